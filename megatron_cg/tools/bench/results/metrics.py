"""Converts the results of a configuration to metrics and to tables. Pure.

Note [Which rank]
    Ranks wait for each other in every step, so times are those of rank 0, which also made the
    trace. Memory is the maximum over ranks, because the rank that needs most is the one that fails.

Note [Rounds together]
    Step times are those of all rounds. Memory is the maximum over rounds, and capture time is the
    median over rounds. All other metrics come from the first round that measured them, because
    later rounds are only timed.

Note [Which trace]
    Metrics of the GPU come from the device-only trace. If a result has none, as in earlier
    versions, they come from the trace with host events. There a slowed host makes idle time longer
    and overlap smaller. The two traces are never mixed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_cg.tools.bench.results.rounds import (
    Ratio,
    later_per_earlier,
    ratio,
    round_medians,
    step_times,
)
from megatron_cg.tools.bench.runs.configurations import EAGER, KNOWN
from megatron_cg.tools.bench.runs.store import Result, by_configuration, table_slug

MIB = 2**20
_GPU_TIMES = ("busy", "busy_without_nccl", "exposed_nccl", "idle", "idle_for_host", "longest_gap")
Metrics = Mapping[str, Any]
"""The metrics of a configuration by name, times in ms and memory in MiB; None: not measured.

``benchmarks/README.md`` says what each is.
"""


def joined(rounds: Sequence[Result]) -> Metrics:
    """The metrics of one configuration's rounds; runs that failed may have some.

    See Note [Rounds together].
    """
    found = _of_steps(rounds) | _of_gpu(rounds) | _of_captures(rounds) | _of_timed(rounds)
    step, busy = found["step"], found["busy"]
    return found | {"step_per_busy": step / busy if step and busy else None}


def _of_steps(rounds: Sequence[Result]) -> dict[str, Any]:
    steps = [step for result in rounds for step in step_times(result)]
    return {
        "step": _median(steps),
        "quartiles": np.quantile(steps, (0.25, 0.75)).tolist() if steps else None,
        "least": min(steps, default=None),
        "most": max(steps, default=None),
        # The median step time of each round.
        "medians": list(round_medians(rounds).values()),
        "later_per_earlier": later_per_earlier(rounds),
    }


def _of_gpu(rounds: Sequence[Result]) -> dict[str, Any]:
    """``device_alone``: whether they come from the device-only trace; see Note [Which trace]."""
    traces = [(one.get("device_trace"), one.get("trace")) for one in rounds]
    alone, whole = next((found for found in traces if any(found)), (None, None))
    trace = alone or whole or {}
    found = {name: trace.get(f"{name}_ms") for name in _GPU_TIMES}
    if gaps := trace.get("longest_gaps"):  # As earlier versions wrote it.
        found["longest_gap"] = gaps[0]["us"] / 1e3
    launches = {name: trace.get(name) for name in ("kernel_launches", "graph_launches")}
    return {"device_alone": bool(alone), **found, **launches}


def _of_captures(rounds: Sequence[Result]) -> dict[str, Any]:
    captures = [r["captures"][-1] for one in rounds for r in one["ranks"] if r["captures"]]
    firsts = [one["ranks"][0]["captures"] for one in rounds if one["ranks"]]
    own = [found[-1] for found in firsts if found]
    graphs = [one for one in own if one.get("warmup_seconds") is not None]
    return {
        "capture_seconds": _median(one["seconds"] for one in own),
        "capture_without_warmup": _median(one["seconds"] - one["warmup_seconds"] for one in graphs),
        "capture_peak": _most(captures, "peak_allocated"),
    }


def _of_timed(rounds: Sequence[Result]) -> dict[str, Any]:
    """Memory of all ranks; ``allocated`` and ``loss`` are those at the end of the timed steps."""
    timed = [r["timed"] for one in rounds for r in one["ranks"] if r.get("timed")]
    first = timed[0] if timed else {}
    counters = first.get("counters") or {}
    replayed = counters.get("replayed")
    return {
        **{name: _most(timed, name) for name in ("peak_allocated", "peak_reserved", "allocated")},
        "bytes_per_replay": counters["bytes_copied"] / replayed if replayed else None,
        "loss": first.get("loss"),
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _most(measured: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The greatest value of torch's allocator, in MiB."""
    memories = (one.get("memory") for one in measured)
    return max((memory[name] / MIB for memory in memories if memory), default=None)


@dataclass(frozen=True)
class Row:
    """One configuration of a table."""

    rounds: tuple[Result, ...]
    metrics: Metrics
    table: Mapping[str, Row] = field(repr=False, compare=False)
    """All rows of the same table by name."""

    @property
    def result(self) -> Result:
        """The result of the first round; only this one has more than timed steps."""
        return self.rounds[0]

    @property
    def name(self) -> str:
        """The configuration's name."""
        return str(self.result["key"]["contender"])

    @property
    def baseline_name(self) -> str:
        """The configuration that the ratios of this one are to."""
        return KNOWN[self.name].baseline

    @property
    def baseline(self) -> Row | None:
        """Its baseline in this table."""
        return self.table.get(self.baseline_name)

    @property
    def same_invocation(self) -> bool:
        """Whether its baseline was run side by side with this one."""
        base = self.baseline
        return base is not None and base.result["invocation"] == self.result["invocation"]

    @property
    def probed(self) -> Mapping[str, Any] | None:
        """The host time by phase that rank 0 measured."""
        ranks = self.result["ranks"]
        return ranks[0].get("probed") if ranks else None

    def ratio(self, name: str, to: str = "") -> float | None:
        """A metric relative to that metric of its baseline, or to the one named ``to``."""
        own = self.metrics[name]
        base = self.baseline.metrics[to or name] if self.baseline else None
        return own / base if own is not None and base else None

    def step_ratio(self, other: Row | None) -> Ratio | None:
        """The step time relative to another configuration of this table, within each round."""
        return ratio(self.rounds, other.rounds) if other else None


def tables(results: Iterable[Result]) -> list[list[Row]]:
    """The results as tables, each in the order of ``KNOWN``."""
    order = list(KNOWN)
    groups: dict[str, dict[str, Row]] = {}
    for rounds in by_configuration(results):
        table = groups.setdefault(table_slug(rounds[0]["key"]), {})
        row = Row(tuple(rounds), joined(rounds), table)
        table[row.name] = row
    return [
        sorted(table.values(), key=lambda row: order.index(row.name)) for table in groups.values()
    ]


def has_other_baselines(rows: Iterable[Row]) -> bool:
    """Whether a configuration of this table has another baseline than fsdp-eager."""
    return any(row.baseline_name != EAGER for row in rows)
