"""Decides whether the rest of ``--budget-seconds`` is enough for a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.store import configuration_slug, table_slug


class Budget:
    """Estimates run times from earlier runs of the same size."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._slower: dict[str, float] = {}
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
        of_size = self._slower.get(table_slug(run.key), 1.0)
        return run.seconds() * self._slower.get(configuration_slug(run.key), of_size)

    def took(self, run: PlannedRun, seconds: float) -> None:
        """Learn from a finished run."""
        for name in (table_slug(run.key), configuration_slug(run.key)):
            self._slower[name] = seconds / run.seconds()
