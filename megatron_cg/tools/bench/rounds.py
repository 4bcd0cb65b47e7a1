"""Contenders that were run in several rounds, against each other. Pure.

Note [Ratios within a round]
    The same contender has shown medians 15% apart within minutes, on one machine: its processors
    drift. So step times are compared within a round only, where contenders follow one another
    closely, and every other round has the reverse order, so that an even drift favours each of
    them in turn: it cancels in an even number of rounds, of which the median is the mean of two
    from the middle. That median is told with the least and the greatest ratio: where 1 is between
    those, neither contender was faster in all rounds.

    A round that the budget or a failure ended counts for every two contenders that it measured:
    those that it lacks take nothing from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.bench_schedule import of_all_rounds, round_of, slug
from megatron_cg.tools.bench.spreads import spread
from megatron_cg.tools.bench.store import Result

_STEADY = 8
"""Steps below which their halves say nothing."""
Round = tuple[str, int]
"""An invocation, and which round of it."""


@dataclass(frozen=True)
class Ratio:
    """Of one contender's step to another's."""

    median: float
    least: float
    most: float
    rounds: int
    """How many rounds it was taken in; 0 for contenders that were not run side by side."""

    @property
    def side_by_side(self) -> bool:
        """Whether both were run in one invocation."""
        return self.rounds > 0


def by_contender(results: Sequence[Result]) -> list[list[Result]]:
    """The rounds of each contender at each point, the first round first."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(slug(of_all_rounds(result["key"])), []).append(result)
    return [sorted(group, key=lambda result: round_of(result["key"])) for group in groups.values()]


def step_times(result: Result) -> list[float]:
    """Of rank 0, in ms; none where the timed steps did not end."""
    timed = result["ranks"][0].get("timed") if result["ranks"] else None
    return list(timed["step_ms"]) if timed else []


def round_medians(rounds: Sequence[Result]) -> dict[Round, float]:
    """The median step of each round that has step times."""
    return {
        _round(result): spread(step_times(result)).median for result in rounds if _timed(result)
    }


def later_per_earlier(rounds: Sequence[Result]) -> float | None:
    """The later half of a round's steps to its earlier half, medians; the median of the rounds.

    Not 1 where steps are not steady yet, or never will be. None where no round has enough steps.
    """
    found = []
    for steps in map(step_times, rounds):
        if len(steps) >= _STEADY:
            half = len(steps) // 2
            found.append(statistics.median(steps[half:]) / statistics.median(steps[:half]))
    return statistics.median(found) if found else None


def ratio(one: Sequence[Result], other: Sequence[Result]) -> Ratio | None:
    """The step of ``one`` to that of ``other``; None where they have no round in common.

    Those that were never run side by side are compared by all that each has.
    """
    mine, theirs = round_medians(one), round_medians(other)
    if not mine or not theirs:
        return None
    if not {name for name, _ in mine} & {name for name, _ in theirs}:
        whole = _median(one) / _median(other)
        return Ratio(whole, whole, whole, 0)
    found = [mine[name] / theirs[name] for name in mine if name in theirs]
    if not found:
        return None
    return Ratio(statistics.median(found), min(found), max(found), len(found))


def _round(result: Result) -> Round:
    return str(result["invocation"]), round_of(result["key"])


def _timed(result: Result) -> bool:
    return bool(step_times(result))


def _median(rounds: Sequence[Result]) -> float:
    return spread([step for result in rounds for step in step_times(result)]).median
