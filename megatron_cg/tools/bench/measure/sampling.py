"""Takes a sampling profile of this process with py-spy, as a file for speedscope.

py-spy sees every busy thread, including threads without a Python frame, and does not stop them. A
stack that changes while py-spy reads it is lost, and counted as lost. For native frames py-spy has
to stop the threads, also while it reads every library's symbols, which may take minutes.

Relied on: py-spy 0.4's command line, where ``--native`` and ``--nonblocking`` exclude each other.
On SIGINT it writes its samples and reports how many of them failed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
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


def start_sampling(path: Path, *, native: bool = False) -> Callable[[], dict[str, Any]]:
    """Run py-spy on this process, which must allow tracing (root, or ptrace_scope 0).

    Args:
        path: file for the profile, with one part for each thread.
        native: whether it has native frames too.

    Returns:
        What ends the profile, writes its file and returns facts about it, for JSON. ``lost`` counts
        the samples that saw nothing. ``note`` says what went wrong, if anything.
    """
    words = [shutil.which(PROGRAM) or PROGRAM, "record", "--pid", str(os.getpid())]
    words += ["--native" if native else "--nonblocking", "--rate", str(RATE)]
    words += ["--format", "speedscope", "--output", str(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    printed = path.with_suffix(".log")
    try:
        with printed.open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
    except OSError as error:
        note = f"py-spy wrote nothing: {error}"
        return lambda: {"native": native, "lost": 0, "file": path.name, "note": note}
    _wait_until_ready(process, printed, _READY_AFTER[native])

    def stop() -> dict[str, Any]:
        process.send_signal(signal.SIGINT)  # Does nothing to a process that has ended.
        try:
            process.wait(_WRITTEN_AFTER)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return {"native": native, "file": path.name, **_said(printed, written=path.exists())}

    return stop


def _wait_until_ready(process: subprocess.Popen[bytes], printed: Path, seconds: float) -> None:
    """Wait until it samples or exits; stop it if it takes too long."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and _READY not in printed.read_text(errors="replace"):
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
        time.sleep(0.05)


def _said(printed: Path, *, written: bool) -> dict[str, Any]:
    """How many samples py-spy lost, and what went wrong."""
    text = printed.read_text(errors="replace")
    lost = _LOST.search(text)
    note = ""
    if not written:
        note = f"py-spy wrote nothing: {(text.strip() or 'it said nothing').splitlines()[-1]}"
    elif _BEHIND in text:
        note = "py-spy fell behind for more than a second, so its times are rough"
    return {"lost": int(lost[1]) if lost else 0, "note": note}
