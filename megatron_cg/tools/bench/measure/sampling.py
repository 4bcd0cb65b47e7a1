"""Takes a sampling profile of this process with py-spy, as a file for speedscope.

py-spy sees every busy thread, including threads without a Python frame, and does not stop them. A
stack that changes while py-spy reads it is lost, and counted as lost. For native frames py-spy has
to stop the threads, also while it reads every library's symbols, which may take minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = "py-spy"
RATE = 200
"""Samples per second."""
SUFFIX = ".speedscope.json"
_READY = "Sampling process"
"""py-spy's output when it starts to sample; with native frames it first reads all symbols."""
_LOST = re.compile(r"Errors: (\d+)")
_BEHIND = "behind in sampling"
_READY_AFTER = {False: 90.0, True: 600.0}
"""Seconds, without and with native frames."""
_WRITTEN_AFTER = 60.0


class PySpy:
    """py-spy on this process, which must allow tracing (root, or ptrace_scope 0).

    Args:
        path: file for the profile, with one part for each thread.
        native: whether it has native frames too.

    Relied on: py-spy 0.4's command line, where ``--native`` and ``--nonblocking`` exclude each
    other. On SIGINT it writes its samples and reports how many of them failed.
    """

    def __init__(self, path: Path, *, native: bool = False) -> None:
        words = [shutil.which(PROGRAM) or PROGRAM, "record", "--pid", str(os.getpid())]
        words += ["--native" if native else "--nonblocking", "--rate", str(RATE)]
        words += ["--format", "speedscope", "--output", str(path)]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._native = path, native
        self._log = path.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(words, stdout=log, stderr=log)
        except OSError as error:
            self._log.write_text(f"{error}\n")
            return
        self._wait_until_ready(self._process)

    def stop(self) -> dict[str, Any]:
        """End the profile and write its file; returns facts about it, for JSON.

        ``lost`` counts the samples that saw nothing. ``note`` says what went wrong, if anything.
        """
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_WRITTEN_AFTER)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        printed = self._printed()
        note = ""
        if not self._path.exists():
            last = printed.strip().splitlines()[-1:] or ["it said nothing"]
            note = f"py-spy wrote nothing: {last[0]}"
        elif _BEHIND in printed:
            note = "py-spy fell behind for more than a second, so its times are rough"
        lost = _LOST.search(printed)
        return {
            "native": self._native,
            "lost": int(lost[1]) if lost else 0,
            "file": self._path.name,
            "note": note,
        }

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it samples or exits; stop it if it takes too long."""
        deadline = time.monotonic() + _READY_AFTER[self._native]
        while process.poll() is None and _READY not in self._printed():
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
            time.sleep(0.05)

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")
