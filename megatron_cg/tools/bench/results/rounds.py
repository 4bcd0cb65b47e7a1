"""Compares configurations that were run in several rounds. Pure.

Note [Ratios within a round]
    The same configuration has shown medians 15% apart within minutes on one machine, because its
    processors drift. So step times are compared only within a round, where configurations run
    closely one after the other. Every other round has the reverse order, so a steady drift favours
    each of them in turn. It cancels in an even number of rounds, because their median is the mean
    of the two middle values. The median is reported with the smallest and the largest ratio. If 1
    is between those, neither configuration was faster in all rounds.

    If the budget or a failure ended a round, the round still counts for any two configurations
    that it measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.runs.store import Result, round_of

_STEADY = 8
"""With fewer steps, a comparison of their halves means nothing."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of one configuration's step time to another's."""

    median: float
    least: float
    most: float
    rounds: int
    """The number of rounds; 0 for configurations that were not run side by side."""

    @property
    def side_by_side(self) -> bool:
        """Whether both were run in one invocation."""
        return self.rounds > 0


def step_times(result: Result) -> list[float]:
    """Step times of rank 0, in ms; empty if the timed steps did not finish."""
    timed = result["ranks"][0].get("timed") if result["ranks"] else None
    return list(timed["step_ms"]) if timed else []


def round_medians(rounds: Sequence[Result]) -> dict[tuple[str, int], float]:
    """The median step time of each round that has step times, by invocation and round."""
    return {
        (str(result["invocation"]), round_of(result["key"])): statistics.median(steps)
        for result in rounds
        if (steps := step_times(result))
    }


def later_per_earlier(rounds: Sequence[Result]) -> float | None:
    """The ratio of the later to the earlier half of a round's steps (medians); median over rounds.

    It is not 1 if step times are not steady. None if no round has enough steps.
    """
    found = []
    for steps in map(step_times, rounds):
        if len(steps) >= _STEADY:
            half = len(steps) // 2
            found.append(statistics.median(steps[half:]) / statistics.median(steps[:half]))
    return statistics.median(found) if found else None


def ratio(one: Sequence[Result], other: Sequence[Result]) -> Ratio | None:
    """The step time of ``one`` relative to ``other``; None if they have no round in common.

    If they were never run side by side, all rounds of each are compared.
    """
    mine, theirs = round_medians(one), round_medians(other)
    if not mine or not theirs:
        return None
    if not {name for name, _ in mine} & {name for name, _ in theirs}:
        whole = _median_of_all(one) / _median_of_all(other)
        return Ratio(whole, whole, whole, 0)
    found = [mine[name] / theirs[name] for name in mine if name in theirs]
    if not found:
        return None
    return Ratio(statistics.median(found), min(found), max(found), len(found))


def _median_of_all(rounds: Sequence[Result]) -> float:
    return statistics.median(step for result in rounds for step in step_times(result))
