"""Takes a sampling profile of this process, with py-spy if it is installed, else with a thread.

py-spy sees every busy thread, including threads without a Python frame, and does not stop them. A
stack that changes while py-spy reads it is lost, and counted as lost. For native frames py-spy has
to stop the threads, also while it reads every library's symbols, which may take minutes.

The thread needs no installation. It sees only Python frames, including those of waiting threads,
and runs only when it gets the GIL. So it sees work that never releases the GIL too late.
"""

from __future__ import annotations

import os
import re
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

from megatron_cg.files import write_text

INTERVAL = 0.005
"""Seconds between two samples of the thread; py-spy also takes 200 samples per second."""
_READY = "Sampling process"
"""py-spy's output when it starts to sample; with native frames it first reads all symbols."""
_LOST = re.compile(r"Errors: (\d+)")
_BEHIND = "behind in sampling"
_READY_AFTER = {False: 90.0, True: 600.0}
"""Seconds, without and with native frames."""
_WRITTEN_AFTER = 60.0


class Sampler(Protocol):
    """A profile in progress."""

    def stop(self) -> dict[str, Any]:
        """End the profile and write its file; returns facts about it, for JSON.

        ``interval_ms`` is the time between two samples. ``lost`` counts the samples that saw
        nothing.
        """


def sampling(path: Path, *, native: bool = False) -> Sampler:
    """Start to sample this process; the folded stacks go to ``path``.

    Only py-spy supports ``native`` frames.
    """
    program = shutil.which("py-spy")
    if program is not None:
        sampler = PySpy(program, path, native=native)
        if sampler.is_ready():
            return sampler
        return ThreadSampler(path, f"py-spy cannot sample here: {sampler.said()}")
    return ThreadSampler(path, "py-spy is not installed")


class PySpy:
    """py-spy on this process, which must allow tracing (root, or ptrace_scope 0).

    Relied on: py-spy 0.4's command line, where ``--native`` and ``--nonblocking`` exclude each
    other. On SIGINT it writes its samples and reports how many of them failed.
    """

    def __init__(self, program: str, path: Path, *, native: bool = False) -> None:
        words = [program, "record", "--pid", str(os.getpid()), "--threads"]
        words += ["--native" if native else "--nonblocking", "--rate", f"{1 / INTERVAL:.0f}"]
        words += ["--format", "raw", "--output", str(path)]
        self._native = native
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._log = path.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        """Wait until it samples; False if it exits first, or takes too long and is stopped."""
        deadline = time.monotonic() + _READY_AFTER[self._native]
        while self._process.poll() is None:
            if _READY in self._printed():
                return True
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                break
            time.sleep(0.05)
        return False

    def said(self) -> str:
        """The last line that it printed."""
        lines = self._printed().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> dict[str, Any]:
        """See :class:`Sampler`."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_WRITTEN_AFTER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        printed = self._printed()
        note = ""
        if not self._path.exists():
            note = f"py-spy wrote nothing: {self.said()}"
        elif _BEHIND in printed:
            note = "py-spy fell behind its looks for more than a second: the times are rough"
        lost = _LOST.search(printed)
        return {
            "sampler": "py-spy",
            "native": self._native,
            "interval_ms": INTERVAL * 1e3,
            "lost": int(lost[1]) if lost else 0,
            "file": self._path.name,
            "note": note,
        }

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")


class ThreadSampler:
    """A thread that samples the Python frames of every other thread.

    Args:
        path: file for the folded stacks.
        note: why this sampler is used and not py-spy.
    """

    def __init__(self, path: Path, note: str = "", interval: float = INTERVAL) -> None:
        self._path, self._note, self._interval = path, note, interval
        self._stacks: Counter[str] = Counter()
        self._looks = 0
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """See :class:`Sampler`."""
        self._ended.set()
        self._thread.join()
        took = time.perf_counter() - self._began
        lines = [f"{stack} {count}\n" for stack, count in sorted(self._stacks.items())]
        write_text(self._path, "".join(lines))
        return {
            "sampler": "thread",
            "native": False,
            # The actual interval, which is longer than the requested one.
            "interval_ms": took * 1e3 / max(1, self._looks),
            "lost": 0,
            "file": self._path.name,
            "note": self._note,
        }

    def _sample(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(self._interval):
            self._looks += 1
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
