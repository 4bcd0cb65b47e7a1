"""Converts records to the points of curves. Pure; nothing about appearance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.tools.report.story import Story

LIMIT = 1000
"""Maximum number of points of a curve: more than it has pixels."""
MEANS = 200
"""Maximum number of points of a curve of means."""
NORM = "gradient norm"


@dataclass(frozen=True)
class Series:
    """Points in the order of ``x``; ``y`` may contain NaN for a missing number."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    @property
    def finite(self) -> tuple[float, ...]:
        """The numbers among ``y``."""
        return tuple(value for value in self.y if math.isfinite(value))


@dataclass(frozen=True)
class Quantity:
    """One number per step, of one run or of two."""

    name: str
    run: Series
    reference: Series | None = None
    difference: Series | None = None
    """Run minus reference at each common step, on the rank where it is largest."""
    compared: int = 0
    """How many numbers both runs have, over all ranks."""
    unequal: tuple[tuple[int, int], ...] = ()
    """(step from 1, rank) of the numbers that differ in any bit, in the order of steps."""


def quantities(story: Story) -> list[Quantity]:
    """Losses and the gradient norm, the first loss first."""
    names = dict.fromkeys(name for _, name, _ in _numbers(story.rank))
    return [_quantity(story, name) for name in names]


def _quantity(story: Story, name: str) -> Quantity:
    run = _curve(story.rank, name)
    other = story.reference_rank
    if story.reference is None or other is None:
        return Quantity(name, run)
    if not story.is_comparable:
        return Quantity(name, run, _curve(other, name))
    widest: dict[int, float] = {}
    unequal, compared = [], 0
    for rank in sorted(set(story.run) & set(story.reference)):
        ours, theirs = (_by_step(records[rank], name) for records in (story.run, story.reference))
        for step in sorted(set(ours) & set(theirs)):
            compared += 1
            one, two = ours[step], theirs[step]
            if one != two:
                unequal.append((step, rank))
            difference = float.fromhex(one) - float.fromhex(two) if one != two else 0.0
            if not abs(difference) <= abs(widest.get(step, 0.0)):  # true for NaN too
                widest[step] = difference
            widest.setdefault(step, 0.0)
    steps = tuple(sorted(widest))
    return Quantity(
        name,
        run,
        _curve(other, name),
        Series(steps, tuple(widest[step] for step in steps)),
        compared,
        tuple(sorted(unequal)),
    )


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """(step from 1, name, the number as ``float.hex``) in the order they were trained."""
    for index, step in enumerate(record["steps"], 1):
        for name, value in step["losses"].items():
            yield index, name, value["hex"]
        if step["grad_norm"] is not None:
            yield index, NORM, step["grad_norm"]["hex"]


def _by_step(record: Mapping[str, Any], name: str) -> dict[int, str]:
    return {step: text for step, found, text in _numbers(record) if found == name}


def _curve(record: Mapping[str, Any], name: str) -> Series:
    points = _by_step(record, name)
    return Series(tuple(points), tuple(map(float.fromhex, points.values())))


def step_times(record: Mapping[str, Any]) -> Series:
    """Milliseconds of each step."""
    times = tuple(float(step["milliseconds"]) for step in record["steps"])
    return Series(tuple(range(1, len(times) + 1)), times)


def counted_steps(story: Story) -> range:
    """The steps, from 1, whose times are compared: those with graphs, except the first.

    Without graphs the second half, because the first half contains one-time work.
    """
    steps, captured = len(story.rank["steps"]), story.captured_after
    if story.reference_rank is not None:
        steps = min(steps, len(story.reference_rank["steps"]))
    first = steps // 2 + 1 if captured is None else captured + (2 if steps - captured > 1 else 1)
    return range(first, steps + 1)


def median_time(record: Mapping[str, Any], steps: range) -> float | None:
    """Milliseconds, or None where no step is left."""
    times = [s["milliseconds"] for n, s in enumerate(record["steps"], 1) if n in steps]
    return statistics.median(times) if times else None


def phase_times(record: Mapping[str, Any], steps: range) -> dict[str, float]:
    """The median milliseconds of each phase of a step; empty if phases were not recorded.

    The time outside all phases is ``rest``.
    """
    rows = [s for n, s in enumerate(record["steps"], 1) if n in steps and s.get("phases")]
    if not rows:
        return {}
    names = dict.fromkeys(name for row in rows for name in row["phases"])
    found = {n: statistics.median(float(row["phases"].get(n, 0.0)) for row in rows) for n in names}
    rest = [row["milliseconds"] - sum(row["phases"].values()) for row in rows]
    return found | {"rest": max(0.0, statistics.median(rest))}


def rates(record: Mapping[str, Any], group: str, name: str, scale: float = 1.0) -> Series:
    """The growth of a count per step, times ``scale``: the mean since the previous point."""
    before, step = 0.0, 0
    points = []
    rows = list(record.get("intervals", ()))
    stride = -(-len(rows) // MEANS) or 1
    # Counted from the end, so that the last count is included.
    for row in rows[(len(rows) - 1) % stride :: stride] if rows else ():
        now = float(row[group].get(name, 0))
        if row["step"] > step:
            points.append((row["step"], (now - before) / (row["step"] - step) * scale))
        before, step = now, row["step"]
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))


def memory_over_steps(record: Mapping[str, Any], name: str) -> Series:
    """MiB after steps, of ``allocated_bytes`` or the like; empty without a GPU."""
    rows = [row for row in record.get("intervals", ()) if row["memory"] is not None]
    return Series(
        tuple(row["step"] for row in rows), tuple(row["memory"][name] / 2**20 for row in rows)
    )


def thin(series: Series, limit: int = LIMIT) -> Series:
    """At most about ``limit`` points: the lowest and the highest of each interval, in order."""
    count = len(series.x)
    if count <= limit:
        return series
    kept: list[int] = []
    stretches = max(1, limit // 2)
    for number in range(stretches):
        inside = range(number * count // stretches, (number + 1) * count // stretches)
        comparable = [index for index in inside if not math.isnan(series.y[index])]
        if comparable:
            ends = (
                min(comparable, key=series.y.__getitem__),
                max(comparable, key=series.y.__getitem__),
            )
            kept += sorted(set(ends))
    return Series(tuple(series.x[i] for i in kept), tuple(series.y[i] for i in kept))


def median(values: Sequence[float]) -> float:
    """The median; NaN of an empty sequence."""
    return statistics.median(values) if values else math.nan
