"""Computes from a trace how busy a GPU was and how long it waited. Pure.

Note [Two traces]
    Host events in a trace, and ranges around phases, slow down the host. It then falls behind the
    GPU, although without them it is well ahead. So the GPU waits, and collectives overlap with
    nothing. Metrics of the GPU therefore come from a trace with device events only. Its steps are
    nearly as long as the timed ones. Of the host it has only the CUDA calls. ``idle.py`` analyses
    what the host did while the GPU waited, from another trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_cg.tools.bench.traces.hostwork import shown
from megatron_cg.tools.bench.traces.intervals import Interval, gaps, length, union
from megatron_cg.tools.bench.traces.spreads import MetricsError
from megatron_cg.tools.bench.traces.timeline import RUNTIME, Event, Timeline

LISTED = 15
"""The number of rows in a list of the longest gaps."""
_KERNEL = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")
_GRAPH = ("cudaGraphLaunch", "cuGraphLaunch")
_COPY = ("cudaMemcpy", "cuMemcpy")
_SET = ("cudaMemset", "cuMemset")
_WAIT = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True, slots=True)
class Gap:
    """A period in which the GPU had nothing to do."""

    start: float
    end: float
    ended_by: Event
    launch: Event | None
    """The call that launched the work that ended it; None if the trace has no such call."""

    @property
    def length(self) -> float:
        """In microseconds."""
        return self.end - self.start

    @property
    def launched_late(self) -> bool:
        """Whether the GPU became idle before that call, so it waited for the host."""
        return self.launch is not None and self.launch.start >= self.start

    def row(self) -> dict[str, Any]:
        """A row in the list of the longest gaps."""
        name = shown(self.ended_by.name)[:120]
        return {"us": self.length, "ended_by": name, "launched_late": self.launched_late}


def find_gaps(timeline: Timeline) -> list[Gap]:
    """All gaps in the order of time."""
    launches = timeline.launches()
    begins: dict[float, Event] = {}
    for event in timeline.device:
        begins.setdefault(event.start, event)
    found = []
    for start, end in gaps(_union(timeline.device)):
        event = begins[end]
        launch = None if event.correlation is None else launches.get(event.correlation)
        found.append(Gap(start, end, event, launch))
    return found


def busy_metrics(timeline: Timeline, steps: int) -> dict[str, Any]:
    """Metrics of the GPU from a trace of that many steps; times in milliseconds per step.

    NCCL is exposed while its kernels run and no other kernel, copy or memset does. Metrics of the
    host's calls are left out if the trace has none.

    Raises MetricsError if the trace has no GPU work.
    """
    busy = _union(timeline.device)
    if not busy:
        raise MetricsError("there is no kernel in the trace: was it made on a GPU?")
    without = per_step(_union(event for event in timeline.device if not event.is_nccl), steps)
    found = find_gaps(timeline)
    return {
        "steps": steps,
        "window_ms": (busy[-1][1] - busy[0][0]) / 1e3 / steps,
        "busy_ms": per_step(busy, steps),
        "busy_without_nccl_ms": without,
        "nccl_ms": per_step(_union(e for e in timeline.device if e.is_nccl), steps),
        "exposed_nccl_ms": per_step(busy, steps) - without,
        "kernels": sum(event.category == "kernel" for event in timeline.device) / steps,
        "idle_ms": sum(gap.length for gap in found) / 1e3 / steps,
        "gaps": len(found) / steps,
        "longest_gaps": [gap.row() for gap in longest(found)],
        **_calls(timeline, found, steps),
    }


def per_step(merged: Iterable[Interval], steps: int) -> float:
    """Their total length, in milliseconds per step."""
    return length(merged) / 1e3 / steps


def longest(found: Iterable[Gap]) -> list[Gap]:
    """The gaps to list, the longest first."""
    return sorted(found, key=lambda gap: -gap.length)[:LISTED]


def _union(events: Iterable[Event]) -> list[Interval]:
    return union((event.start, event.end) for event in events)


def _calls(timeline: Timeline, found: Iterable[Gap], steps: int) -> dict[str, float]:
    """Launches and waits per step; a driver call inside a runtime call is the same call."""
    calls: dict[Any, Event] = {}
    for thread, events in timeline.host.items():
        for index, event in enumerate(events):
            if event.category in RUNTIME:
                key = event.correlation
                calls.setdefault((thread, index) if key is None else key, event)
    if not calls:
        return {}

    def count(prefixes: tuple[str, ...]) -> float:
        return sum(event.name.startswith(prefixes) for event in calls.values()) / steps

    waited = sum(e.end - e.start for e in calls.values() if e.name.startswith(_WAIT))
    late = sum(gap.length for gap in found if gap.launched_late)
    return {
        "kernel_launches": count(_KERNEL),
        "graph_launches": count(_GRAPH),
        "copies": count(_COPY),
        "sets": count(_SET),
        "waits": count(_WAIT),
        "waited_ms": waited / 1e3 / steps,
        "idle_for_host_ms": late / 1e3 / steps,
    }
