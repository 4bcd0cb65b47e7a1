"""A bar for warmup and capture, on rank 0 and on a terminal only.

It is drawn from the thread that captures, when a pass has ended: a thread of its own could run in
the middle of a graph's capture.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PAUSE = 0.05
"""Seconds between two drawings."""


class CaptureBar:
    """Passes done, of a capture's ``total``, of which the first ``warmup`` are warmup.

    Args:
        total: forward and backward passes from the first warmup to the last capture.
        warmup: how many of them come before what is captured.
        stream: a terminal.
    """

    def __init__(self, total: int, warmup: int, stream: TextIO) -> None:
        self._warmup, self._done = warmup, 0
        self._progress = Progress(
            TextColumn("megatron_cg: {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("passes"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(self._phase(), total=total)
        self._progress.start()
        self._drawn = time.monotonic()

    def advance(self) -> None:
        """One pass more; draws where the last drawing is long enough ago."""
        self._done += 1
        now = time.monotonic()
        if now - self._drawn >= _PAUSE:
            self._draw()
            self._drawn = now

    def close(self) -> None:
        """Take the bar off the terminal. Safe to run twice."""
        self._progress.stop()

    def _draw(self) -> None:
        self._progress.update(self._task, completed=self._done, description=self._phase())
        self._progress.refresh()

    def _phase(self) -> str:
        return "warming up" if self._done < self._warmup else "capturing"


def capture_bar(total: int, warmup: int) -> CaptureBar | None:
    """A bar on standard error; None on another rank than 0 and where that is no terminal."""
    if not is_first_rank() or not sys.stderr.isatty():
        return None
    return CaptureBar(total, warmup, sys.stderr)


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
