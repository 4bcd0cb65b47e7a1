"""The end of a process that is out of step with the other ranks.

Note [Nothing at the end may wait]
    Such a process has work in flight that no other rank joins: an NCCL kernel, a vote. Much of what
    an interpreter does when it ends waits for such work: CUDA when memory or a stream is freed,
    gloo when a group's threads are joined. The error is printed by then, but the process stays, and
    the launcher, which only sees processes end, lets all ranks stand until somebody's timeout. So
    it leaves before that: the error is out, the logs are written, nothing is taken apart.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress


def exit_without_waiting() -> None:
    """From now on this process ends with exit code 1 as soon as its script has ended.

    Functions that ``atexit`` runs do not run any more, but for those registered later. Safe to call
    twice.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    try:
        # Whoever read the output may be gone, and there may be no output at all.
        for finish in (logging.shutdown, *(s.flush for s in (sys.stdout, sys.stderr) if s)):
            with suppress(Exception):
                finish()
    finally:
        os._exit(1)
