"""The end of a process that is out of step with the other ranks.

Note [Nothing at the end may wait]
    Such a process has work in flight that no other rank joins: an NCCL kernel or a vote. Much of
    the interpreter's shutdown waits for it, and the launcher only sees processes end. So the
    process prints the error and tears nothing down. What scripts and libraries have registered with
    ``atexit`` runs for :data:`SECONDS`. If it takes longer, a thread does the rest: children that
    are daemons end, since a forked one keeps this process's sockets open; temporary folders and
    logs follow. A second limit holds even if no Python can run.

Note [Errors that a script may catch]
    After a failed vote no rank can go on. After a replay that is refused by an error, other ranks
    wait as well, but a script may catch the error on all ranks and go on. So what such an error
    arranges is undone when the next step begins, or when the graphs are closed and no error is
    under way.
"""

import atexit
import faulthandler
import logging
import multiprocessing
import os
import sys
import time
import weakref
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

SECONDS = 10.0
"""How long functions of ``atexit`` may take."""
_MORE = 30.0  # seconds that the thread has for the rest
_for_good = False
_leaving: Event | None = None


def exit_without_waiting() -> None:
    """Make this process end soon, with exit code 1, when its script has ended.

    Functions that were registered with ``atexit`` run for a limited time. Safe to call twice.
    """
    global _for_good
    _for_good = True
    _register()


def arm_fast_exit() -> None:
    """The same, if there are other ranks, until :func:`clear_exit`; see the note above."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _register()


def clear_exit() -> None:
    """Undo :func:`arm_fast_exit`, outside of the handling of an error."""
    if not _for_good and sys.exception() is None:
        atexit.unregister(_leave)


def _register() -> None:
    global _leaving
    atexit.unregister(_leave)
    atexit.register(_leave)
    if _leaving is None:  # Python 3.12 starts no threads during shutdown.
        _leaving = Event()
        Thread(target=_end_in_time, args=(_leaving,), daemon=True).start()


def _leave() -> None:
    atexit.unregister(_leave)
    assert _leaving is not None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(SECONDS + _MORE, exit=True, file=nowhere)
    _leaving.set()
    try:
        atexit._run_exitfuncs()
    finally:
        _end()


def _end_in_time(leaving: Event) -> None:
    leaving.wait()
    time.sleep(SECONDS)
    _end()


def _end() -> None:
    folders: Any = weakref.finalize
    try:
        children = [child.kill for child in multiprocessing.active_children() if child.daemon]
        # The reader of the output may be gone, or there may be no output at all.
        flushes = [stream.flush for stream in (sys.stdout, sys.stderr) if stream]
        for finish in (*children, folders._exitfunc, logging.shutdown, *flushes):
            with suppress(BaseException):
                finish()
    finally:
        os._exit(1)
