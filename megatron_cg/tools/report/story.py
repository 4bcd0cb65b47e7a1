"""What a page tells of: one run, and the one that it is compared with. Reads the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_cg.telemetry.record_schema import CAPTURED_AFTER, read_run, record_files
from megatron_cg.tools.align.compare import NOT_COMPARABLE, Comparison, RecordError, Run, compare

EAGER, GRAPHS = "eager", "graphs"


@dataclass(frozen=True)
class Story:
    """``reference`` is None where one run alone is told of; names are for legends."""

    title: str
    run: Run
    name: str = GRAPHS
    reference: Run | None = None
    reference_name: str = EAGER

    @property
    def rank(self) -> Mapping[str, Any]:
        """The run's record of its first rank, from which curves are drawn."""
        return self.run[min(self.run)]

    @property
    def reference_rank(self) -> Mapping[str, Any] | None:
        """The same of the run that it is compared with."""
        return None if self.reference is None else self.reference[min(self.reference)]

    @property
    def runs(self) -> tuple[tuple[str, Run], ...]:
        """The runs by name, the one that is compared with first."""
        first = () if self.reference is None else ((self.reference_name, self.reference),)
        return (*first, (self.name, self.run))

    @cached_property
    def comparison(self) -> Comparison | None:
        """Both runs' numbers bit for bit, by the rules of ``megatron-cg align``."""
        if self.reference is None:
            return None
        labels = f"the run {self.reference_name}", f"the run {self.name}"
        return compare(self.reference, self.run, labels)

    @property
    def is_comparable(self) -> bool:
        """Whether there are two runs and their setups are the same."""
        return self.comparison is not None and self.comparison.status != NOT_COMPARABLE

    @property
    def captures(self) -> list[Mapping[str, Any]]:
        """What is recorded of the first rank's captures that came to graphs."""
        return [c for c in self.rank.get("captures", ()) if c["graphs"]]

    @property
    def captured_after(self) -> int | None:
        """Steps before the first capture that came to graphs."""
        made = self.captures
        found = made[0]["after_step"] if made else self.rank.get(CAPTURED_AFTER)
        return None if found is None else int(found)

    @property
    def on_gpu(self) -> bool:
        """Whether times and memory are a GPU's."""
        return bool(self.rank.get("device", "cpu") != "cpu")


def read_story(directory: Path, against: Path | None = None) -> Story:
    """The runs in ``directory``: what ``align`` or ``--cg-report`` left there.

    Args:
        directory: with ``eager`` and ``graphs`` in it, or one run's ``rank0.json``, or with a
            ``record`` that has it.
        against: another such folder of one run, to compare with.

    Raises RecordError where there is no record, or two runs are compared with a third.
    """
    pair = all(_records(directory / name) for name in (EAGER, GRAPHS))
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
    title = " against ".join(names)
    made = [(run, f"{names[0]} ({_kind(run)})"), (other, f"{names[1]} ({_kind(other)})")]
    if _kind(run) == EAGER and _kind(other) == GRAPHS:
        # A run with graphs is compared with an eager run, in whatever order they are named.
        made.reverse()
    (run, name), (other, other_name) = made
    return Story(title, run, name, other, other_name)


def _kind(run: Run) -> str:
    """Whether some rank of the run captured graphs."""
    ranks = run.values()
    return GRAPHS if any(CAPTURED_AFTER in rank or rank["graphs"] for rank in ranks) else EAGER


def _records(directory: Path) -> Path | None:
    """Where the records of one run are, if there are any."""
    there = (place for place in (directory, directory / "record") if place.is_dir())
    return next((place for place in there if record_files(place)), None)


def _read(directory: Path) -> dict[int, dict[str, Any]]:
    return read_run(_records(directory) or directory)


def _title(directory: Path) -> str:
    name = directory.resolve().name
    return directory.resolve().parent.name if name == "record" else name
