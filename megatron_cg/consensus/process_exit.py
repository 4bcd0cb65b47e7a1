"""The end of a process that is out of step with the other ranks.

Note [Nothing at the end may wait]
    Such a process has work in flight that no other rank joins: an NCCL kernel or a vote. Much of
    the interpreter's shutdown waits for such work: CUDA when it frees memory or a stream, gloo when
    it joins the threads of a group. The launcher only sees processes end, so all ranks would hang
    until some timeout. So the process prints the error, writes the logs and tears nothing down.

Note [Errors that a script may catch]
    After a failed vote no rank can go on. After a replay that is refused by an error, other ranks
    wait as well, but a script may catch the error on all ranks and go on. So what such an error
    arranges is undone when the next step begins, or when the graphs are closed and no error is
    under way.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress

import torch.distributed as dist

_for_good = False


def exit_without_waiting() -> None:
    """Make this process end with exit code 1 as soon as its script has ended.

    Functions that were registered with ``atexit`` before no longer run; those registered later
    still do. Safe to call twice.
    """
    global _for_good
    _for_good = True
    _register()


def exit_without_waiting_unless_it_goes_on() -> None:
    """The same, if there are other ranks, until :func:`goes_on`; see the note above."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _register()


def goes_on() -> None:
    """Undo :func:`exit_without_waiting_unless_it_goes_on`, outside of the handling of an error."""
    if not _for_good and sys.exception() is None:
        atexit.unregister(_leave)


def _register() -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    try:
        # The reader of the output may be gone, or there may be no output at all.
        for finish in (logging.shutdown, *(s.flush for s in (sys.stdout, sys.stderr) if s)):
            with suppress(Exception):
                finish()
    finally:
        os._exit(1)
