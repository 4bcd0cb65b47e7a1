"""The runs of a page, one or two, read from their records, and the points of their curves."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_cg.telemetry.read_record import captured_after, read_run, record_files
from megatron_cg.tools.align.compare import (
    NOT_COMPARABLE,
    Comparison,
    Run,
    Value,
    compare,
    numbers_of,
)
from megatron_cg.tools.align.run import EAGER, GRAPHS

MIB = 2**20
Curve = dict[int, float]
"""A number at each step, from 1, in the order of steps."""


@dataclass(frozen=True)
class Story:
    title: str
    runs: Mapping[str, Run]
    """By name. The last is the page's run; one before it is the reference, as an eager run is."""

    @property
    def name(self) -> str:
        return list(self.runs)[-1]

    @property
    def run(self) -> Run:
        return self.runs[self.name]

    @cached_property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """The record of each run's first rank, by name; curves are drawn from them."""
        return {name: run[min(run)] for name, run in self.runs.items()}

    @property
    def rank(self) -> Mapping[str, Any]:
        return self.records[self.name]

    @cached_property
    def comparison(self) -> Comparison | None:
        """Both runs' numbers bit for bit, by the rules of ``megatron-cg align``."""
        if len(self.runs) == 1:
            return None
        reference, name = self.runs
        return compare(self.runs[reference], self.run, (f"the run {reference}", f"the run {name}"))

    @property
    def captures(self) -> list[Mapping[str, Any]]:
        return [c for c in self.rank.get("captures", ()) if c["graphs"]]

    @property
    def captured_after(self) -> int | None:
        return captured_after(self.rank)

    @property
    def on_gpu(self) -> bool:
        return bool(self.rank.get("device", "cpu") != "cpu")


@dataclass(frozen=True)
class Quantity:
    """One number per step, of the first rank of each run that has it."""

    name: str
    curves: Mapping[str, Curve]
    values: tuple[Value, ...] = ()
    """The numbers that both runs have, over all ranks; empty if they cannot be compared."""

    @property
    def unequal(self) -> list[Value]:
        """Those that differ in any bit, in the order of steps."""
        return [value for value in self.values if not value.same]

    @property
    def difference(self) -> Curve:
        """The widest difference of each common step, over all ranks; none is wider than NaN."""
        widest: Curve = {}
        for value in self.values:
            found = 0.0 if value.same else value.difference
            widest[value.step] = max(widest.get(value.step, 0.0), found, key=width)
        return widest


def width(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def losses(story: Story) -> list[Quantity]:
    curves = {name: _curves(record) for name, record in story.records.items()}
    comparison = story.comparison
    values: tuple[Value, ...] = ()
    if comparison is not None and comparison.status != NOT_COMPARABLE:
        values = comparison.values
    return [
        Quantity(
            name,
            {run: found[name] for run, found in curves.items() if name in found},
            tuple(v for v in values if v.name == name and None not in (v.eager, v.graphed)),
        )
        for name in curves[story.name]
    ]


def _curves(record: Mapping[str, Any]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for index in range(len(record["steps"])):
        for name, text in numbers_of(record["steps"], index).items():
            curves.setdefault(name, {})[index + 1] = float.fromhex(text)
    return curves


def step_times(story: Story) -> Quantity:
    curves = {
        name: {number: float(s["milliseconds"]) for number, s in enumerate(record["steps"], 1)}
        for name, record in story.records.items()
    }
    return Quantity("milliseconds", curves)


def counted_steps(story: Story) -> range:
    """The steps, from 1, whose times are compared: those with graphs, except the first.

    Without graphs the second half, because the first half contains one-time work.
    """
    steps = min(len(record["steps"]) for record in story.records.values())
    captured = story.captured_after
    return range(steps // 2 + 1 if captured is None else captured + 2, steps + 1)


def median_times(story: Story) -> dict[str, float]:
    steps = counted_steps(story)
    return {
        name: statistics.median(curve[step] for step in steps)
        for name, curve in step_times(story).curves.items()
        if steps
    }


def memory(story: Story) -> Quantity:
    """MiB of tensors and graphs after steps; without curves if there is no GPU."""
    curves = {
        name: {
            row["step"]: row["memory"]["allocated_bytes"] / MIB
            for row in record.get("intervals", ())
            if row["memory"] is not None
        }
        for name, record in story.records.items()
    }
    return Quantity("MiB", {name: curve for name, curve in curves.items() if curve})


def read_story(directory: Path, against: Path | None = None) -> Story:
    """The runs in ``directory``, as written by ``align`` or ``--cg-report``.

    It contains one run's ``rank0.jsonl``, or a ``record`` with it, or ``eager`` and ``graphs``, as
    align leaves them. ``against`` is another folder of one run, the reference. Raises RecordError
    if there is no record.
    """
    title = _title(directory)
    if against is not None:
        names = _title(against), title
        if names[0] == names[1]:
            names = str(against), str(directory)
        runs = dict(zip(names, map(_read, (against, directory)), strict=True))
        return Story(" against ".join(reversed(names)), runs)
    pair = [directory / name for name in (EAGER, GRAPHS)]
    if all(map(_records, pair)):
        return Story(title, {place.name: _read(place) for place in pair})
    return Story(title, {title: _read(directory)})


def _records(directory: Path) -> Path | None:
    there = (place for place in (directory, directory / "record") if place.is_dir())
    return next((place for place in there if record_files(place)), None)


def _read(directory: Path) -> Run:
    return read_run(_records(directory) or directory)


def _title(directory: Path) -> str:
    place = directory.resolve()
    return place.parent.name if place.name == "record" else place.name
