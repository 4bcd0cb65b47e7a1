"""Converts records to the points of curves. Pure; nothing about appearance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from megatron_cg.tools.align.compare import Run, numbers_of
from megatron_cg.tools.report.story import Story, first_rank

MIB = 2**20

LIMIT = 1000
"""Maximum number of points of a curve: more than it has pixels."""
MEANS = 200
"""Maximum number of points of a curve of means."""


Curve = dict[int, float]
"""A number at each step, from 1, in the order of steps; NaN where it is no number."""


@dataclass(frozen=True)
class Quantity:
    """One number per step, of one run or of two."""

    name: str
    run: Curve
    reference: Curve | None = None
    difference: Curve | None = None
    """Run minus reference at each common step, on the rank where it is widest."""
    compared: int = 0
    """How many numbers both runs have, over all ranks."""
    unequal: tuple[tuple[int, int], ...] = ()
    """(step from 1, rank) of the numbers that differ in any bit, in the order of steps."""


def quantities(story: Story) -> list[Quantity]:
    """Losses and the gradient norm, the first loss first."""
    other = None if story.reference is None else _curves(story.reference)
    found = []
    for name, run in _curves(story.run).items():
        reference = None if other is None else other.get(name, {})
        compared: dict[str, Any] = _compared(story, name) if story.is_comparable else {}
        found.append(Quantity(name, run, reference, **compared))
    return found


def width(difference: float) -> float:
    """How wide a difference is; none is wider than NaN."""
    return math.inf if math.isnan(difference) else abs(difference)


def _compared(story: Story, name: str) -> dict[str, Any]:
    """The fields of a quantity that two runs have together."""
    values = [v for v in story.values if v.name == name and None not in (v.eager, v.graphed)]
    differences: dict[int, list[float]] = {}
    for value in values:
        run, reference = (float.fromhex(text or "") for text in (value.graphed, value.eager))
        differences.setdefault(value.step, []).append(0.0 if value.same else run - reference)
    return {
        "difference": {step: max(found, key=width) for step, found in differences.items()},
        "compared": len(values),
        "unequal": tuple((value.step, value.rank) for value in values if not value.same),
    }


def _curves(run: Run) -> dict[str, Curve]:
    """The numbers of the first rank, by name, in the order in which they were trained."""
    steps = first_rank(run)["steps"]
    curves: dict[str, Curve] = {}
    for index in range(len(steps)):
        for name, text in numbers_of(steps, index).items():
            curves.setdefault(name, {})[index + 1] = float.fromhex(text)
    return curves


def step_times(record: Mapping[str, Any]) -> Curve:
    """Milliseconds of each step."""
    return {number: float(s["milliseconds"]) for number, s in enumerate(record["steps"], 1)}


def counted_steps(story: Story) -> range:
    """The steps, from 1, whose times are compared: those with graphs, except the first.

    Without graphs the second half, because the first half contains one-time work.
    """
    steps = min(len(record["steps"]) for _, record in story.records)
    captured = story.captured_after
    first = steps // 2 + 1 if captured is None else captured + (2 if steps - captured > 1 else 1)
    return range(first, steps + 1)


def median_times(story: Story) -> dict[str, float]:
    """Milliseconds of the median counted step, by run; without runs that have no such step."""
    steps = counted_steps(story)
    times = {
        name: [time for number, time in step_times(record).items() if number in steps]
        for name, record in story.records
    }
    return {name: statistics.median(found) for name, found in times.items() if found}


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


def rates(record: Mapping[str, Any], group: str, name: str, scale: float = 1.0) -> Curve:
    """The growth of a count per step, times ``scale``: the mean since the previous point."""
    before, step = 0.0, 0
    points: Curve = {}
    rows = list(record.get("intervals", ()))
    stride = -(-len(rows) // MEANS) or 1
    # Counted from the end, so that the last count is included.
    for row in rows[::-1][::stride][::-1]:
        now = float(row[group].get(name, 0))
        if row["step"] > step:
            points[row["step"]] = (now - before) / (row["step"] - step) * scale
        before, step = now, row["step"]
    return points


def memory_over_steps(record: Mapping[str, Any], name: str) -> Curve:
    """MiB after steps, of ``allocated_bytes`` or the like; empty without a GPU."""
    rows = [row for row in record.get("intervals", ()) if row["memory"] is not None]
    return {row["step"]: row["memory"][name] / MIB for row in rows}


def thin(curve: Curve, limit: int = LIMIT) -> Curve:
    """At most about ``limit`` points: the lowest and the highest of each interval, in order."""
    if len(curve) <= limit:
        return curve
    points, stretches = list(curve.items()), max(1, limit // 2)
    kept: Curve = {}
    for start, end in pairwise(n * len(points) // stretches for n in range(stretches + 1)):
        inside = [point for point in points[start:end] if not math.isnan(point[1])]
        if inside:
            kept |= sorted({choose(inside, key=itemgetter(1)) for choose in (min, max)})
    return kept
