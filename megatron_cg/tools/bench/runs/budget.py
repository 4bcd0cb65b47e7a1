"""Decides whether the rest of ``--budget-seconds`` is enough for a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun, table_key


class Budget:
    """Estimates run times from earlier runs of the same size."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._slower: dict[tuple[Any, ...], float] = {}
        """Ratios of actual to estimated run time; by size, and by size and configuration."""

    def left(self) -> float:
        """Seconds left; infinite without a budget."""
        return max(0.0, self._end - self._clock())

    def refusal(self, run: PlannedRun) -> str:
        """Why ``run`` must not be started; empty if it may."""
        expected, left = self.expected(run), self.left()
        if expected <= left:
            return ""
        return f"{expected:.0f} s expected, {left:.0f} s left of --budget-seconds"

    def expected(self, run: PlannedRun) -> float:
        """The expected seconds of ``run``."""
        size = table_key(run.key)
        slower = self._slower.get((*size, run.configuration), self._slower.get(size, 1.0))
        return run.seconds() * slower

    def took(self, run: PlannedRun, seconds: float) -> None:
        """Learn from a finished run."""
        size = table_key(run.key)
        self._slower[size] = self._slower[*size, run.configuration] = seconds / run.seconds()
