"""Whether what is left of ``--budget-seconds`` is enough for a run, or for a whole round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_cg.bench.schedule import PlannedRun, table_key


class Budget:
    """Guesses how long runs take, by what runs of their size have taken so far.

    Rounds after the first are whole or are not begun: part of one is time that no ratio gains by.
    Of the first round every run is worth having.
    """

    def __init__(
        self,
        seconds: float | None,
        runs: Sequence[PlannedRun],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``runs`` are all that can be made; the time begins now."""
        self._runs = runs
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._slower: dict[tuple[Any, ...], float] = {}
        """Than the guess that a run makes of itself; by size, and by size and contender."""
        self._rounds: dict[tuple[Any, ...], str] = {}
        """Why a round is not begun; empty for one that is."""

    def left(self) -> float:
        """Seconds; infinite without a budget."""
        return max(0.0, self._end - self._clock())

    def refusal(self, run: PlannedRun) -> str:
        """Why ``run`` is not to be begun; empty where it can."""
        whole = self._of_round(run)
        return whole or self._lack(self.expected(run))

    def expected(self, run: PlannedRun) -> float:
        """How many seconds ``run`` will take."""
        size = table_key(run.key)
        slower = self._slower.get((*size, run.contender), self._slower.get(size, 1.0))
        return run.seconds() * slower

    def took(self, run: PlannedRun, seconds: float) -> None:
        """Learn from a run that was made."""
        size = table_key(run.key)
        self._slower[size] = self._slower[*size, run.contender] = seconds / run.seconds()

    def _of_round(self, run: PlannedRun) -> str:
        if run.round == 1:
            return ""
        name = (*table_key(run.key), run.round)
        if name not in self._rounds:
            members = [one for one in self._runs if (*table_key(one.key), one.round) == name]
            lack = self._lack(sum(self.expected(one) for one in members))
            self._rounds[name] = f"round {run.round} is not begun: {lack}" if lack else ""
        return self._rounds[name]

    def _lack(self, expected: float) -> str:
        left = self.left()
        if expected <= left:
            return ""
        return f"{expected:.0f} s expected, {left:.0f} s left of --budget-seconds"
