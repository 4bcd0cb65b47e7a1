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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_cg.tools.bench.results.rounds import (
    Ratio,
    by_configuration,
    later_per_earlier,
    ratio,
    round_medians,
    step_times,
)
from megatron_cg.tools.bench.runs.bench_schedule import table_key
from megatron_cg.tools.bench.runs.configurations import EAGER, KNOWN
from megatron_cg.tools.bench.runs.store import Result
from megatron_cg.tools.bench.traces.spreads import Spread, spread

MIB = 2**20


@dataclass(frozen=True)
class Metrics:
    """The metrics of a configuration; None means not measured. Times in ms, memory in MiB."""

    step: Spread | None = None
    """From the start of a step to the start of the next one."""
    medians: tuple[float, ...] = ()
    """The median step time of each round."""
    later_per_earlier: float | None = None
    """The later half of a round's steps relative to the earlier half; 1 if they are steady."""
    busy: float | None = None
    """GPU time per step in which a kernel, copy or memset ran, on any stream."""
    busy_without_nccl: float | None = None
    exposed_nccl: float | None = None
    """Time in which only NCCL's kernels ran."""
    idle: float | None = None
    """Idle time of the GPU in the traced steps."""
    idle_for_host: float | None = None
    """The part of ``idle`` in which the host had not yet launched the next work."""
    longest_gap: float | None = None
    kernel_launches: float | None = None
    graph_launches: float | None = None
    capture_seconds: float | None = None
    """The whole last capture."""
    capture_without_warmup: float | None = None
    load_seconds: float | None = None
    """To check, load and compare layers that were compiled beforehand, before the first step."""
    compile_seconds: float | None = None
    """To compile them: once, for all ranks and all runs of these flags."""
    capture_peak: float | None = None
    peak_allocated: float | None = None
    """Peak in the timed steps."""
    peak_reserved: float | None = None
    allocated: float | None = None
    """At the end of the timed steps."""
    bytes_per_replay: float | None = None
    loss: float | None = None
    """After the last timed step."""
    device_alone: bool = False
    """Whether the GPU metrics come from the device-only trace. See Note [Which trace]."""

    @property
    def step_per_busy(self) -> float | None:
        """The step time relative to the GPU's busy time in it."""
        return self.step.median / self.busy if self.step and self.busy else None


def metrics(result: Result) -> Metrics:
    """All metrics in one run's result; a run that failed may have some."""
    ranks = result["ranks"]
    if not ranks:
        return Metrics()
    first, alone = ranks[0], result.get("device_trace")
    trace = alone or result["trace"] or {}
    timed = first.get("timed") or {}
    capture = first["captures"][-1] if first["captures"] else {}
    loaded = capture.get("loaded") or {}
    seconds, warmup = capture.get("seconds"), capture.get("warmup_seconds")
    whole = [rank["captures"][-1].get("memory") for rank in ranks if rank["captures"]]
    steady = [(rank.get("timed") or {}).get("memory") for rank in ranks]
    gaps = trace.get("longest_gaps") or []
    steps = step_times(result)
    step = spread(steps) if steps else None
    return Metrics(
        step=step,
        medians=(step.median,) if step else (),
        later_per_earlier=later_per_earlier([result]),
        busy=trace.get("busy_ms"),
        busy_without_nccl=trace.get("busy_without_nccl_ms"),
        exposed_nccl=trace.get("exposed_nccl_ms"),
        idle=trace.get("idle_ms"),
        idle_for_host=trace.get("idle_for_host_ms"),
        longest_gap=gaps[0]["us"] / 1e3 if gaps else None,
        kernel_launches=trace.get("kernel_launches"),
        graph_launches=trace.get("graph_launches"),
        capture_seconds=seconds,
        capture_without_warmup=seconds - warmup if seconds and warmup is not None else None,
        load_seconds=loaded.get("load_seconds"),
        compile_seconds=loaded.get("compile_seconds"),
        capture_peak=_most(whole, "peak_allocated"),
        peak_allocated=_most(steady, "peak_allocated"),
        peak_reserved=_most(steady, "peak_reserved"),
        allocated=_most(steady, "allocated"),
        bytes_per_replay=_bytes_per_replay(timed.get("counters")),
        loss=timed.get("loss"),
        device_alone=bool(alone),
    )


_APART = ("step", "medians", "later_per_earlier", "device_alone")
_MOST = ("capture_peak", "peak_allocated", "peak_reserved", "allocated")
_MEDIAN = ("capture_seconds", "capture_without_warmup", "load_seconds", "compile_seconds")


def joined(rounds: Sequence[Result]) -> Metrics:
    """The joint metrics of one configuration's rounds. See Note [Rounds together]."""
    each = [metrics(result) for result in rounds]
    found: dict[str, float] = {}
    for name in (one.name for one in fields(Metrics) if one.name not in _APART):
        values = [value for one in each if (value := getattr(one, name)) is not None]
        if values:
            found[name] = _join(name, values)
    steps = [step for result in rounds for step in step_times(result)]
    medians = tuple(round_medians(rounds).values())
    alone = next((one.device_alone for one in each if one.busy is not None), False)
    return Metrics(
        step=spread(steps) if steps else None,
        medians=medians,
        later_per_earlier=later_per_earlier(rounds),
        device_alone=alone,
        **found,
    )


def _join(name: str, values: Sequence[float]) -> float:
    if name in _MOST:
        return max(values)
    return statistics.median(values) if name in _MEDIAN else values[0]


def _most(memories: Sequence[Mapping[str, int] | None], name: str) -> float | None:
    values = [memory[name] for memory in memories if memory]
    return max(values) / MIB if values else None


def _bytes_per_replay(counters: Mapping[str, int] | None) -> float | None:
    if not counters or not counters.get("replayed"):
        return None
    return counters["bytes_copied"] / counters["replayed"]


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
    def eager(self) -> Row | None:
        """fsdp-eager of this table."""
        return self.table.get(EAGER)

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

    def ratio(self, read: Callable[[Metrics], float | None]) -> float | None:
        """A metric relative to that of its baseline."""
        own = read(self.metrics)
        base = read(self.baseline.metrics) if self.baseline else None
        return own / base if own is not None and base else None

    def step_ratio(self, other: Row | None) -> Ratio | None:
        """The step time relative to another configuration of this table, within each round."""
        return ratio(self.rounds, other.rounds) if other else None


def tables(results: Sequence[Result]) -> list[list[Row]]:
    """The results as tables, each in the order of ``KNOWN``."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(table_key(result["key"]), []).append(result)
    return [_table(group) for group in groups.values()]


def _table(group: Sequence[Result]) -> list[Row]:
    order = list(KNOWN)
    configurations = by_configuration(group)
    configurations.sort(key=lambda rounds: order.index(rounds[0]["key"]["contender"]))
    table: dict[str, Row] = {}
    for rounds in configurations:
        row = Row(tuple(rounds), joined(rounds), table)
        table[row.name] = row
    return list(table.values())


def has_other_baselines(rows: Iterable[Row]) -> bool:
    """Whether a configuration of this table has another baseline than fsdp-eager."""
    return any(row.baseline_name != EAGER for row in rows)


def step_median(found: Metrics) -> float | None:
    """For :meth:`Row.ratio`."""
    return found.step.median if found.step else None
