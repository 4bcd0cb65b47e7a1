"""Whether what is left of ``--budget-seconds`` is enough for a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from megatron_cg.tools.bench.bench_schedule import PlannedRun, table_key


class Budget:
    """Guesses how long runs take, by what runs of their size have taken so far."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """The time begins now."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._slower: dict[tuple[Any, ...], float] = {}
        """Than the guess that a run makes of itself; by size, and by size and contender."""

    def left(self) -> float:
        """Seconds; infinite without a budget."""
        return max(0.0, self._end - self._clock())

    def refusal(self, run: PlannedRun) -> str:
        """Why ``run`` is not to be begun; empty where it can."""
        expected, left = self.expected(run), self.left()
        if expected <= left:
            return ""
        return f"{expected:.0f} s expected, {left:.0f} s left of --budget-seconds"

    def expected(self, run: PlannedRun) -> float:
        """How many seconds ``run`` will take."""
        size = table_key(run.key)
        slower = self._slower.get((*size, run.contender), self._slower.get(size, 1.0))
        return run.seconds() * slower

    def took(self, run: PlannedRun, seconds: float) -> None:
        """Learn from a run that was made."""
        size = table_key(run.key)
        self._slower[size] = self._slower[*size, run.contender] = seconds / run.seconds()
