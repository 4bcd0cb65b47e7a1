"""A sampling profile of this process: by py-spy where it is installed, else by a thread.

py-spy sees native frames and every thread, also those that hold no Python frame. The thread sees
Python's frames alone, and only when the interpreter lets it run, so work that never gives up the
interpreter's lock is seen late; it needs nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

INTERVAL = 0.005
"""Seconds between two samples of the thread; py-spy takes 200 a second too."""
_READY = "Sampling process"
"""What py-spy says once it samples; with native frames it first reads every library's symbols."""
_READY_AFTER = 90.0
_WRITTEN_AFTER = 60.0


class Sampler(Protocol):
    """A profile that is being taken."""

    def stop(self) -> dict[str, Any]:
        """End it and write its file; how it was taken, for JSON."""


def sampling(path: Path) -> Sampler:
    """Begin to sample this process; the folded stacks go to ``path``."""
    program = shutil.which("py-spy")
    if program is not None:
        sampler = PySpy(program, path)
        if sampler.is_ready():
            return sampler
        return ThreadSampler(path, f"py-spy cannot sample here: {sampler.said()}")
    return ThreadSampler(path, "py-spy is not installed")


class PySpy:
    """py-spy on this very process, which it has to be allowed to trace (root, or ptrace_scope 0).

    Relied on: py-spy 0.4's command line; on SIGINT it writes what it has.
    """

    def __init__(self, program: str, path: Path) -> None:
        words = [program, "record", "--pid", str(os.getpid()), "--native", "--threads"]
        words += ["--rate", "200", "--format", "raw", "--output", str(path)]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._log = path.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        """Wait until it samples; False where it ends before, or takes too long and is ended."""
        deadline = time.monotonic() + _READY_AFTER
        while self._process.poll() is None:
            if _READY in self._log.read_text(errors="replace"):
                return True
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                break
            time.sleep(0.05)
        return False

    def said(self) -> str:
        """The last line that it printed."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> dict[str, Any]:
        """See :class:`Sampler`."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_WRITTEN_AFTER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        note = "" if self._path.exists() else f"py-spy wrote nothing: {self.said()}"
        return {"sampler": "py-spy", "file": self._path.name, "note": note}


class ThreadSampler:
    """A thread that looks at every other thread's Python frames.

    Args:
        path: where the folded stacks go.
        note: why this one and not py-spy.
    """

    def __init__(self, path: Path, note: str = "", interval: float = INTERVAL) -> None:
        self._path, self._note, self._interval = path, note, interval
        self._stacks: Counter[str] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """See :class:`Sampler`."""
        self._ended.set()
        self._thread.join()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{stack} {count}\n" for stack, count in sorted(self._stacks.items())]
        self._path.write_text("".join(lines), encoding="utf-8")
        return {"sampler": "thread", "file": self._path.name, "note": self._note}

    def _sample(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(self._interval):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own:
                    name = names.get(ident, str(ident))
                    self._stacks[f"thread {name};{_folded(frame)}"] += 1


def _folded(frame: FrameType | None) -> str:
    frames = []
    while frame is not None:
        code = frame.f_code
        file = os.path.basename(code.co_filename)
        frames.append(f"{code.co_qualname} ({file}:{frame.f_lineno})".replace(";", ","))
        frame = frame.f_back
    return ";".join(reversed(frames))
