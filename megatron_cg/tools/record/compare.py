"""Reads records, and compares those of the same training bit for bit.

``record.py`` writes ``rank<N>.jsonl``, one JSON object a line. A reader puts the lines together to
one dictionary: lists such as ``steps`` grow, ``parameters`` gains names, and any other key is set.
``evaluation`` has losses of an evaluation after the last step. A run that is killed may leave a
part of a last line, which is ignored.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

FORMAT = 1
FILE = re.compile(r"rank(0|[1-9][0-9]*)\.jsonl")
_GROWING = ("steps", "captures")
EXIT_CODES = {"identical": 0, "different": 1, "not comparable": 2, "failed": 3}
"""Of ``megatron-cg align``, by the status of a comparison."""
IDENTICAL, DIFFERENT, NOT_COMPARABLE, FAILED = EXIT_CODES
Rank = Mapping[str, Any]
Run = Mapping[int, Rank]
_LABELS = "the eager run", "the graph run"


class RecordError(MegatronCGError):
    """A run left no record, or one that cannot be read."""


def read_run(directory: Path) -> dict[int, dict[str, Any]]:
    """The record of each rank in ``directory``, by rank.

    Raises RecordError with one line if there is none, or a line of one cannot be read. Values are
    not checked: a run writes what fits.
    """
    files = sorted(path for path in directory.iterdir() if FILE.fullmatch(path.name))
    if not files:
        raise RecordError(
            f"{directory} holds no record (rank0.jsonl, ...): training did not begin, the record "
            "could not be written, or the run was not started with --cg-record."
        )
    ranks = {data["rank"]: data for data in map(_read, files)}
    sizes = sorted({data["world_size"] for data in ranks.values()})
    if len(sizes) > 1:
        raise RecordError(
            f"{directory} holds records of runs with {' and '.join(map(str, sizes))} ranks: give "
            "each run a folder of its own."
        )
    return ranks


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = {name: [] for name in _GROWING}
    data |= {"parameters": {}, "graphs": None, "finished": False, "error": None}
    *lines, last = path.read_bytes().split(b"\n")
    with suppress(ValueError, RecursionError):  # A killed run may leave a part of a line.
        json.loads(last)
        lines.append(last)
    number = 0
    try:
        for line in lines:
            number += 1
            _add(data, line.decode())
        if path.name != f"rank{data['rank']}.jsonl" or data["rank"] >= data["world_size"]:
            raise ValueError(f"it is of rank {data['rank']} of {data['world_size']}")
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        cause = f"line {number}: {type(error).__name__}: {error}".encode("unicode_escape").decode()
        raise RecordError(f"{path} is not a record of this package: {cause[:200]}.") from None
    return data


def _add(data: dict[str, Any], line: str) -> None:
    entry = json.loads(line)
    if entry.get("format", FORMAT) != FORMAT:
        raise ValueError("it is of another version, so record the run again")
    for name, value in entry.items():
        if name in _GROWING:
            data[name] += value
        elif name == "parameters":
            data[name] |= value
        elif name == "evaluation":
            data["steps"][-1]["losses"] |= value
        else:
            data[name] = value


@dataclass(frozen=True)
class Value:
    """One number of one step in both runs, as ``float.hex`` strings; None if it is missing."""

    rank: int
    step: int
    name: str
    eager: str | None
    graphed: str | None

    @property
    def same(self) -> bool:
        return self.eager == self.graphed

    @property
    def difference(self) -> float:
        """``|graphed - eager|``; NaN if one of them is missing or not finite."""
        if self.eager is None or self.graphed is None:
            return math.nan
        return abs(float.fromhex(self.graphed) - float.fromhex(self.eager))


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison, and what was compared.

    ``status`` is ``identical``, ``different``, ``failed`` or ``not comparable``. Unless it is
    ``identical``, ``reason`` says why and names the first differing step and tensor.
    """

    status: str
    reason: str
    values: tuple[Value, ...] = ()
    shards: int = 0  # parameter shards compared, over all ranks
    different_shards: tuple[str, ...] = ()
    graphs: Mapping[str, int] = field(default_factory=dict)
    """Captured, replayed and eager counts of the graph run, summed over ranks."""


@dataclass(frozen=True)
class Outcome:
    """The result of two runs, and its evidence."""

    comparison: Comparison
    log_tail: str = ""
    """The end of the log of a failed run, whose records are None, or what it says of a step."""
    eager: Run | None = None
    graphed: Run | None = None


def compare(eager: Run, graphed: Run) -> Comparison:
    """Compare two runs.

    They are ``identical`` only if every loss, gradient norm and parameter shard of every rank has
    the same bits, training ran to its end and changed the parameters, all numbers are finite, and
    the second run captured and replayed graphs. Otherwise equal numbers prove nothing. Runs with
    different ranks, versions or devices are ``not comparable``; none of their numbers are compared.
    """
    counts = graph_counts(graphed)
    for label, run in zip(_LABELS, (eager, graphed), strict=True):
        size = next(iter(run.values()))["world_size"]
        if absent := ", ".join([str(rank) for rank in range(size) if rank not in run][:6]):
            found = f"{label} has records of {len(run)} of its {size} ranks, none of {absent}"
            return Comparison(FAILED, found, graphs=counts)
    made, also_made = _setup(eager[0]), _setup(graphed[0])
    if unlike := _unequal(made, also_made):
        said = [f"{name} {made.get(name)} and {also_made.get(name)}" for name in unlike]
        reason = f"{' and '.join(_LABELS)} have different setups: {'; '.join(said)}"
        return Comparison(NOT_COMPARABLE, reason, graphs=counts)
    values = tuple(_values(eager, graphed))
    shards, different = _shards(eager, graphed)
    facts = (values, shards, different, counts)
    if flaw := next(_flaws(eager, graphed, values), ""):
        return Comparison(FAILED, flaw, *facts)
    first = next((value for value in values if not value.same), None)
    reason = ""
    if first is not None:
        reason = _describe(first, different)
    elif counts.get("steps_differed"):
        reason = "a verified step has other numbers with graphs than eagerly; the log names them"
    elif different:
        reason = (
            f"every loss and gradient norm agrees, but {len(different)} of {shards} parameter "
            f"shards differ, first {different[0]}"
        )
    return Comparison(DIFFERENT if reason else IDENTICAL, reason, *facts)


def _setup(rank: Rank) -> dict[str, Any]:
    """What compared runs have in common; this package changes no number of an eager run."""
    versions = {name: found for name, found in rank["versions"].items() if name != "megatron-cg"}
    return {"world_size": rank["world_size"], "device": rank["device"], **versions}


def _unequal(values: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*values, *others])
    return [name for name in names if values.get(name) != others.get(name)]


def _values(eager: Run, graphed: Run) -> Iterator[Value]:
    """Every number, by step, then by rank, so the first difference is the earliest."""
    longest = max(len(rank["steps"]) for run in (eager, graphed) for rank in run.values())
    for step in range(longest):
        for rank in sorted(eager):
            numbers, others = (numbers_of(run[rank]["steps"], step) for run in (eager, graphed))
            for name in dict.fromkeys([*numbers, *others]):
                yield Value(rank, step + 1, name, numbers.get(name), others.get(name))


def numbers_of(steps: Sequence[Any], step: int) -> dict[str, str]:
    """Losses and gradient norm of a step as ``float.hex``; empty if there is no such step."""
    if step >= len(steps):
        return {}
    numbers = {name: float(value).hex() for name, value in steps[step]["losses"].items()}
    if steps[step]["grad_norm"] is not None:
        numbers["gradient norm"] = float(steps[step]["grad_norm"]).hex()
    return numbers


def _shards(eager: Run, graphed: Run) -> tuple[int, tuple[str, ...]]:
    """The number of shards in the two runs, and the shards that are not equal in both."""
    count, different = 0, []
    for rank in sorted(eager):
        shards, others = eager[rank]["parameters"], graphed[rank]["parameters"]
        count += len({*shards, *others})
        different += [f"rank {rank} {name}" for name in _unequal(shards, others)]
    return count, tuple(different)


def graph_counts(run: Run) -> dict[str, int]:
    """The run's counters, summed over all ranks; none if it did not end."""
    total: Counter[str] = Counter()
    for rank in run.values():
        total.update(rank["graphs"] or {})
    return dict(total)


def _flaws(eager: Run, graphed: Run, values: Sequence[Value]) -> Iterator[str]:
    """Why equal numbers of these two would prove nothing."""
    for label, run in zip(_LABELS, (eager, graphed), strict=True):
        for rank, data in sorted(run.items()):
            where, steps = f"{label}, rank {rank}", data["steps"]
            if data["error"]:
                yield f"{where}: {data['error']}"
            if not data["finished"] or not steps:
                yield f"{where}: training did not run to its end ({len(steps)} steps recorded)"
            if all(step["skipped"] for step in steps):
                yield f"{where}: every step was skipped, so no parameter ever moved"
            if not data["parameters"]:
                yield f"{where}: no parameter shard was recorded"
    for value in values:
        if value.eager is not None and not math.isfinite(float.fromhex(value.eager)):
            number = f"{value.name} is {value.eager} at step {value.step}"
            yield f"the eager run, rank {value.rank}: {number}, and NaN equals any NaN"
    if not graph_counts(graphed).get("captured"):
        yield "the graph run captured no graph, so two eager runs would be compared"
    for rank, data in sorted(graphed.items()):
        if not (data["graphs"] or {}).get("replayed"):
            yield f"the graph run replayed no graph on rank {rank}, so all of it ran eagerly"


def _describe(first: Value, different: tuple[str, ...]) -> str:
    tensor = f"; first differing tensor at the end: {different[0]}" if different else ""
    eager, graphed = (
        "absent" if text is None else f"{float.fromhex(text)!r} ({text})"
        for text in (first.eager, first.graphed)
    )
    return (
        f"first difference at step {first.step}, rank {first.rank}, {first.name}: {eager} in "
        f"{_LABELS[0]}, {graphed} in {_LABELS[1]}{tensor}"
    )
