"""Converts records to the points of curves. Pure; nothing about appearance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cg.tools.align.compare import Run, numbers_of
from megatron_cg.tools.report.story import Story, first_rank

MIB = 2**20
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


def memory_over_steps(record: Mapping[str, Any], name: str) -> Curve:
    """MiB after steps, of ``allocated_bytes`` or the like; empty without a GPU."""
    rows = [row for row in record.get("intervals", ()) if row["memory"] is not None]
    return {row["step"]: row["memory"][name] / MIB for row in rows}
