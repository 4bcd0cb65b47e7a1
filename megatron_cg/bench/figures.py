"""From one run's result to its figures. Pure.

Note [Which rank]
    Ranks wait for each other in every step, so times are those of rank 0, which also made the
    trace. Memory is the most of any rank, since the rank that needs most is the one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.bench.contenders import CONTENDERS, EAGER
from megatron_cg.bench.spreads import Spread, spread
from megatron_cg.bench.store import Result

MIB = 2**20


@dataclass(frozen=True)
class Figures:
    """What one run shows; None is a figure that it did not measure. Times in ms, memory in MiB."""

    step: Spread | None = None
    """From the start of a step to the start of the next one."""
    busy: float | None = None
    """Of the GPU, a step: some kernel, copy or set ran, on whatever stream."""
    busy_without_nccl: float | None = None
    idle: float | None = None
    """In the profiled steps, which the profiler makes longer."""
    idle_for_host: float | None = None
    """Of which the host had not launched yet what came next."""
    longest_gap: float | None = None
    kernel_launches: float | None = None
    graph_launches: float | None = None
    capture_seconds: float | None = None
    """The last capture, whole."""
    capture_without_warmup: float | None = None
    capture_peak: float | None = None
    peak_allocated: float | None = None
    """In the timed steps."""
    peak_reserved: float | None = None
    allocated: float | None = None
    """At the end of the timed steps."""
    bytes_per_replay: float | None = None
    loss: float | None = None
    """After the last timed step."""

    @property
    def step_per_busy(self) -> float | None:
        """How much longer a step is than the work of the GPU in it."""
        return self.step.median / self.busy if self.step and self.busy else None


def figures(result: Result) -> Figures:
    """All figures that ``result`` holds; a run that failed may have some."""
    ranks = result["ranks"]
    if not ranks:
        return Figures()
    first, trace = ranks[0], result["trace"] or {}
    timed = first.get("timed") or {}
    capture = first["captures"][-1] if first["captures"] else {}
    seconds, warmup = capture.get("seconds"), capture.get("warmup_seconds")
    whole = [rank["captures"][-1].get("memory") for rank in ranks if rank["captures"]]
    steady = [(rank.get("timed") or {}).get("memory") for rank in ranks]
    gaps = trace.get("longest_gaps") or []
    return Figures(
        step=spread(timed["step_ms"]) if timed else None,
        busy=trace.get("busy_ms"),
        busy_without_nccl=trace.get("busy_without_nccl_ms"),
        idle=trace.get("idle_ms"),
        idle_for_host=trace.get("idle_for_host_ms"),
        longest_gap=gaps[0]["us"] / 1e3 if gaps else None,
        kernel_launches=trace.get("kernel_launches"),
        graph_launches=trace.get("graph_launches"),
        capture_seconds=seconds,
        capture_without_warmup=seconds - warmup if seconds and warmup is not None else None,
        capture_peak=_most(whole, "peak_allocated"),
        peak_allocated=_most(steady, "peak_allocated"),
        peak_reserved=_most(steady, "peak_reserved"),
        allocated=_most(steady, "allocated"),
        bytes_per_replay=_bytes_per_replay(timed.get("counters")),
        loss=timed.get("loss"),
    )


def _most(memories: Sequence[Mapping[str, int] | None], name: str) -> float | None:
    values = [memory[name] for memory in memories if memory]
    return max(values) / MIB if values else None


def _bytes_per_replay(counters: Mapping[str, int] | None) -> float | None:
    if not counters or not counters.get("replayed"):
        return None
    return counters["bytes_copied"] / counters["replayed"]


@dataclass(frozen=True)
class Row:
    """One contender of a table."""

    result: Result
    figures: Figures
    eager: Figures | None
    """Of fsdp-eager in the same table; None where it has none."""
    same_invocation: bool
    """Whether that was made side by side with this one."""

    @property
    def name(self) -> str:
        """The contender's."""
        return str(self.result["key"]["contender"])

    def ratio(self, read: Callable[[Figures], float | None]) -> float | None:
        """A figure against that of fsdp-eager."""
        own = read(self.figures)
        base = read(self.eager) if self.eager else None
        return own / base if own is not None and base else None


def table_key(result: Result) -> tuple[Any, ...]:
    """Equal for results that belong side by side: all of the key but the contender."""
    return tuple(value for name, value in result["key"].items() if name != "contender")


def tables(results: Sequence[Result]) -> list[list[Row]]:
    """The results as tables, each in the order of ``CONTENDERS``."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(table_key(result), []).append(result)
    order = list(CONTENDERS)
    found = []
    for group in groups.values():
        group.sort(key=lambda result: order.index(result["key"]["contender"]))
        base = next((r for r in group if r["key"]["contender"] == EAGER), None)
        eager = figures(base) if base else None
        found.append(
            [
                Row(
                    result,
                    figures(result),
                    eager,
                    base is not None and base["invocation"] == result["invocation"],
                )
                for result in group
            ]
        )
    return found


def step_median(found: Figures) -> float | None:
    """For :meth:`Row.ratio`."""
    return found.step.median if found.step else None
