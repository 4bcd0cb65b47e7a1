"""The runs of a page, one or two, read from their records, and the points of their curves.

``Curve`` is a number at each step, from 1, in the order of steps; NaN where it is no number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_cg.telemetry.read_record import (
    RecordError,
    captured_after,
    read_run,
    record_files,
)
from megatron_cg.tools.align.compare import (
    NOT_COMPARABLE,
    Comparison,
    Run,
    Value,
    compare,
    numbers_of,
)

EAGER, GRAPHS = "eager", "graphs"
MIB = 2**20
Curve = dict[int, float]


@dataclass(frozen=True)
class Story:
    """``reference`` is None if the page shows one run; names are for legends."""

    title: str
    run: Run
    name: str = GRAPHS
    reference: Run | None = None
    reference_name: str = EAGER

    @property
    def runs(self) -> tuple[tuple[str, Run], ...]:
        """The runs by name, the reference first."""
        first = () if self.reference is None else ((self.reference_name, self.reference),)
        return (*first, (self.name, self.run))

    @property
    def records(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """The record of each run's first rank, by name; curves are drawn from them."""
        return tuple((name, first_rank(run)) for name, run in self.runs)

    @property
    def rank(self) -> Mapping[str, Any]:
        """The record of the run's first rank."""
        return first_rank(self.run)

    @cached_property
    def comparison(self) -> Comparison | None:
        """Both runs' numbers bit for bit, by the rules of ``megatron-cg align``."""
        if self.reference is None:
            return None
        labels = f"the run {self.reference_name}", f"the run {self.name}"
        return compare(self.reference, self.run, labels)

    @property
    def values(self) -> tuple[Value, ...]:
        """The numbers that were compared."""
        return () if self.comparison is None else self.comparison.values

    @property
    def is_comparable(self) -> bool:
        """Whether there are two runs with the same setup."""
        return self.comparison is not None and self.comparison.status != NOT_COMPARABLE

    @property
    def captures(self) -> list[Mapping[str, Any]]:
        """The first rank's recorded captures that produced graphs."""
        return [c for c in self.rank.get("captures", ()) if c["graphs"]]

    @property
    def captured_after(self) -> int | None:
        """The number of steps before the first capture that produced graphs."""
        return captured_after(self.rank)

    @property
    def on_gpu(self) -> bool:
        """Whether times and memory were measured on a GPU."""
        return bool(self.rank.get("device", "cpu") != "cpu")


def first_rank(run: Run) -> Mapping[str, Any]:
    """The record of the first rank."""
    return run[min(run)]


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


def read_story(directory: Path, against: Path | None = None) -> Story:
    """The runs in ``directory``, as written by ``align`` or ``--cg-report``.

    Args:
        directory: contains ``eager`` and ``graphs``, or one of them, or one run's ``rank0.jsonl``,
            or a ``record`` with it.
        against: another such folder of one run, the reference, as an eager run is.

    Raises RecordError if there is no record, or if two runs are compared with a third.
    """
    inside = [name for name in (EAGER, GRAPHS) if _records(directory / name)]
    if len(inside) == 1 and not _records(directory):
        directory /= inside[0]
    pair = len(inside) == 2
    if pair and against is not None:
        raise RecordError(
            f"{directory} holds two runs already: leave --against out, or name one of them, such "
            f"as {directory / GRAPHS}."
        )
    if pair:
        eager, graphs = (_read(directory / name) for name in (EAGER, GRAPHS))
        return Story(_title(directory), graphs, reference=eager)
    run = _read(directory)
    if against is None:
        return Story(_title(directory), run, name=_title(directory))
    other = _read(against)
    names = _title(directory), _title(against)
    if names[0] == names[1]:
        names = str(directory), str(against)
    return Story(" against ".join(names), run, names[0], other, names[1])


def _records(directory: Path) -> Path | None:
    """The directory of one run's records, if there are any."""
    there = (place for place in (directory, directory / "record") if place.is_dir())
    return next((place for place in there if record_files(place)), None)


def _read(directory: Path) -> dict[int, dict[str, Any]]:
    return read_run(_records(directory) or directory)


def _title(directory: Path) -> str:
    name = directory.resolve().name
    return directory.resolve().parent.name if name == "record" else name
