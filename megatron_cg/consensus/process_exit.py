"""The end of a process that is out of step with the other ranks.

Note [Nothing at the end may wait]
    Such a process has work in flight that no other rank joins: an NCCL kernel or a vote. Much of
    the interpreter's shutdown waits for such work: CUDA when it frees memory or a stream, gloo when
    it joins the threads of a group. The error is already printed, but the process does not end. The
    launcher only sees processes end, so all ranks hang until some timeout. Therefore the process
    exits earlier: it prints the error, writes the logs and tears nothing down.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress


def exit_without_waiting() -> None:
    """Make this process end with exit code 1 as soon as its script has ended.

    Functions that were registered with ``atexit`` before no longer run; those registered later
    still do. Safe to call twice.
    """
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
