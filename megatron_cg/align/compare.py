"""Two records of the same training, compared bit for bit. Pure but for reading the files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_cg.align.record import CAPTURED_AFTER
from megatron_cg.errors import MegatronCGError

IDENTICAL, DIFFERENT, FAILED = "identical", "different", "failed"
_NEEDED = ("rank", "steps", "parameters", "graphs", "finished", "error")
"""What every record has had since the first."""
Rank = Mapping[str, Any]
Run = Mapping[int, Rank]


class RecordError(MegatronCGError):
    """A run left no record, or one that cannot be read."""


@dataclass(frozen=True)
class Value:
    """One number of one step in both runs, as ``float.hex`` strings; None where it is absent."""

    rank: int
    step: int
    name: str
    eager: str | None
    graphed: str | None

    @property
    def same(self) -> bool:
        """Whether every bit agrees."""
        return self.eager == self.graphed

    @property
    def difference(self) -> float:
        """``|graphed - eager|``; NaN where one of them is absent or not finite."""
        if self.eager is None or self.graphed is None:
            return math.nan
        return abs(float.fromhex(self.graphed) - float.fromhex(self.eager))


@dataclass(frozen=True)
class Comparison:
    """What was compared and the verdict.

    ``status`` is ``identical``, ``different`` or ``failed``; ``reason`` says why it is not
    ``identical`` and names the first differing step and tensor.
    """

    status: str
    reason: str
    values: tuple[Value, ...] = ()
    shards: int = 0
    """Parameter shards compared, over all ranks."""
    different_shards: tuple[str, ...] = ()
    graphs: Mapping[str, int] = field(default_factory=dict)
    """Captured, replayed and eager counts of the graph run, summed over ranks."""


def read_run(directory: Path) -> dict[int, dict[str, Any]]:
    """The record of each rank. Raises RecordError when there is none or one is broken."""
    ranks: dict[int, dict[str, Any]] = {}
    for path in sorted(directory.glob("rank*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            missing = [key for key in _NEEDED if key not in data]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            ranks[int(data["rank"])] = data
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path} is not a record of this package: {error}.") from error
    if not ranks:
        raise RecordError(
            f"{directory} holds no record (rank0.json, ...): training ended before it began, or "
            "the run was not started with --cg-record or --cg-report."
        )
    return ranks


def compare(eager: Run, graphed: Run) -> Comparison:
    """The verdict on two runs.

    They are ``identical`` only if every loss, gradient norm and parameter shard of every rank has
    the same bits, training ran to its end and moved, all numbers are finite, and the second run
    captured and replayed graphs: runs that are equal for a lesser reason show nothing.
    """
    values = tuple(_values(eager, graphed))
    counts = _graph_counts(graphed)
    shards, different = _shards(eager, graphed)
    facts = (values, shards, different, counts)
    broken = _broken(eager, graphed, counts)
    if broken:
        return Comparison(FAILED, broken, *facts)
    first = next((value for value in values if not value.same), None)
    if first is not None:
        reason = _describe(first, different) + _before_capture(first, graphed)
        return Comparison(DIFFERENT, reason, *facts)
    if different:
        reason = f"every loss and gradient norm agrees, but {_count_shards(different, shards)}"
        return Comparison(DIFFERENT, reason, *facts)
    return Comparison(IDENTICAL, "", *facts)


def _values(eager: Run, graphed: Run) -> Iterator[Value]:
    """Every number, by step, then rank, so that the first that differs is the earliest."""
    ranks = sorted(set(eager) & set(graphed))
    longest = max((len(run[r]["steps"]) for run in (eager, graphed) for r in ranks), default=0)
    for step in range(longest):
        for rank in ranks:
            one, two = (_numbers(run[rank]["steps"], step) for run in (eager, graphed))
            for name in dict.fromkeys([*one, *two]):
                yield Value(rank, step + 1, name, one.get(name), two.get(name))


def _numbers(steps: list[Any], step: int) -> dict[str, str]:
    if step >= len(steps):
        return {}
    numbers = {name: value["hex"] for name, value in steps[step]["losses"].items()}
    if steps[step]["grad_norm"] is not None:
        numbers["gradient norm"] = steps[step]["grad_norm"]["hex"]
    return numbers


def _shards(eager: Run, graphed: Run) -> tuple[int, tuple[str, ...]]:
    """How many shards there are in either run, and those that are not equal in both."""
    count, different = 0, []
    for rank in sorted(set(eager) & set(graphed)):
        one, two = eager[rank]["parameters"], graphed[rank]["parameters"]
        names = dict.fromkeys([*one, *two])
        count += len(names)
        different += [f"rank {rank} {name}" for name in names if one.get(name) != two.get(name)]
    return count, tuple(different)


def _graph_counts(run: Run) -> dict[str, int]:
    total: dict[str, int] = {}
    for rank in run.values():
        for name, count in (rank.get("graphs") or {}).items():
            total[name] = total.get(name, 0) + int(count)
    return total


def _broken(eager: Run, graphed: Run, counts: Mapping[str, int]) -> str:
    """Why equality of these two would show nothing; empty if it would."""
    if set(eager) != set(graphed):
        return f"the eager run has ranks {sorted(eager)}, the graph run {sorted(graphed)}"
    for name, run in (("eager", eager), ("graph", graphed)):
        reason = next(filter(None, (_broken_rank(name, r, run[r]) for r in sorted(run))), "")
        if reason:
            return reason
    if not counts.get("captured"):
        return "the graph run captured no graph, so two eager runs would be compared"
    idle = [rank for rank in sorted(graphed) if not (graphed[rank]["graphs"] or {}).get("replayed")]
    if idle:
        return f"the graph run replayed no graph on rank {idle[0]}, so all of it ran eagerly"
    return ""


def _broken_rank(name: str, rank: int, data: Rank) -> str:
    where = f"the {name} run, rank {rank}"
    if data["error"]:
        return f"{where}: {data['error']}"
    if not data["finished"] or not data["steps"]:
        return f"{where}: training did not run to its end ({len(data['steps'])} steps recorded)"
    if all(step["skipped"] for step in data["steps"]):
        return f"{where}: every step was skipped, so no parameter ever moved"
    if not data["parameters"]:
        return f"{where}: no parameter shard was recorded"
    for number in range(len(data["steps"])):
        for key, text in _numbers(data["steps"], number).items():
            if name == "eager" and not math.isfinite(float.fromhex(text)):
                return f"{where}: {key} is {text} at step {number + 1}, and NaN equals any NaN"
    return ""


def _describe(first: Value, different: tuple[str, ...]) -> str:
    tensor = f"; first differing tensor at the end: {different[0]}" if different else ""
    eager, graphed = (
        "absent" if text is None else f"{float.fromhex(text)!r} ({text})"
        for text in (first.eager, first.graphed)
    )
    return (
        f"first difference at step {first.step}, rank {first.rank}, {first.name}: eager {eager}, "
        f"with graphs {graphed}{tensor}"
    )


def _before_capture(first: Value, graphed: Run) -> str:
    """What to make of a difference between steps that were eager in both runs."""
    captured = graphed[first.rank].get(CAPTURED_AFTER)
    if captured is None or first.step > captured:
        return ""
    return (
        f". The graphs were captured after step {captured}, so both runs were still eager: the "
        "training itself is not deterministic here. Align again, and if it stays, look for what "
        "--deterministic-mode does not cover"
    )


def _count_shards(different: tuple[str, ...], total: int) -> str:
    return f"{len(different)} of {total} parameter shards differ, first {different[0]}"
