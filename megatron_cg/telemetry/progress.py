"""A progress bar for warmup and capture, on rank 0 and on a terminal only.

The capturing thread draws it at the end of a pass. A separate thread could run in the middle of a
graph's capture.
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
    """The passes done, out of ``total`` passes of a capture; the first ``warmup`` are warmup.

    Args:
        total: forward and backward passes from the first warmup to the last capture.
        warmup: the number of passes before the first captured one.
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
        """Count one more pass; draw if the last drawing is long enough ago."""
        self._done += 1
        now = time.monotonic()
        if now - self._drawn >= _PAUSE:
            self._draw()
            self._drawn = now

    def close(self) -> None:
        """Clear the bar from the terminal. Safe to call twice."""
        self._progress.stop()

    def _draw(self) -> None:
        self._progress.update(self._task, completed=self._done, description=self._phase())
        self._progress.refresh()

    def _phase(self) -> str:
        return "warming up" if self._done < self._warmup else "capturing"


def capture_bar(total: int, warmup: int) -> CaptureBar | None:
    """A bar on standard error; None on other ranks than 0, and if that is no terminal."""
    if not is_first_rank() or not sys.stderr.isatty():
        return None
    return CaptureBar(total, warmup, sys.stderr)


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
