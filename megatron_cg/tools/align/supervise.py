"""Runs a command, and ends every process that it started: after its end, or if nobody waits for it.

``run.py`` starts this script, with no package on its path, and holds the other end of its
standard input. That end closes however its holder ends, by SIGKILL too. Workers of torchrun have
sessions of their own, and others lose their parent, so processes are found as descendants: a
subreaper (prctl(2)) becomes the parent of those.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PAUSE = 0.1


def main(grace: float, words: list[str]) -> int:
    """Run ``words`` and return the exit code, as a shell does.

    What is left gets SIGTERM, and ``grace`` seconds later SIGKILL.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        started = subprocess.Popen(words, stdin=subprocess.DEVNULL).pid
        while (code := _ended().get(started)) is None:
            if select.select([sys.stdin], [], [], _PAUSE)[0]:
                return 1
        return code if code >= 0 else 128 - code
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            _end_all(number, grace)


def _ended() -> dict[int, int]:
    """The exit codes of children, adopted ones too, that have ended since the last call."""
    codes = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


def _end_all(number: int, seconds: float) -> None:
    """Send a signal to each descendant, and wait until none is left, or that long."""
    deadline, told = time.monotonic() + seconds, set[int]()
    while left := _descendants():
        for pid in left - told:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        # Only now: on a busy host it takes a while to find them, and each gets the signal.
        if time.monotonic() >= deadline:
            return
        told |= left
        time.sleep(_PAUSE)
        _ended()


def _descendants() -> set[int]:
    """All processes below this one that run; see proc(5) for their state and parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = set[int](), [os.getpid()]
    while new:
        new = children.get(new.pop(), []) + new
        found.update(new)
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
