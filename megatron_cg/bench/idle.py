"""How busy a GPU was in a trace, when it waited, and what the host did meanwhile. Pure.

Note [Two ways to name a wait]
    While the GPU waits, some thread is at work: each one's innermost event is counted over all
    idle time. But what ends a gap is a kernel, and the host was on its way to launching just that
    one, so a gap is also put down to the call that ended it. A kernel that had been launched
    before the GPU fell idle waited for something else, another stream or another rank; such gaps
    are not the host's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_cg.bench.hostwork import OUTSIDE, Caller, HostWork, shown
from megatron_cg.bench.intervals import Interval, common, gaps, length, union
from megatron_cg.bench.spreads import FiguresError
from megatron_cg.bench.timeline import RUNTIME, Event, Thread, Timeline

LISTED = 15
"""How many rows a list of the longest has."""
STEPS = "cg: steps"
"""The range around the profiled steps, by which the main thread is known."""
_BACKWARD = "autograd::engine::evaluate_function"
_KERNEL = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")
_GRAPH = ("cudaGraphLaunch", "cuGraphLaunch")
_COPY = ("cudaMemcpy", "cuMemcpy")
_SET = ("cudaMemset", "cuMemset")
_NOBODY = ("?", Caller("?", OUTSIDE))
_WAIT = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def analyse(timeline: Timeline, steps: int) -> dict[str, Any]:
    """All that the report says of a trace of that many steps; times in milliseconds a step.

    Raises FiguresError where no work of a GPU is in it.
    """
    busy = union((event.start, event.end) for event in timeline.device)
    if not busy:
        raise FiguresError("there is no kernel in the trace: was it made on a GPU?")
    waits = gaps(busy)
    work = {thread: HostWork(events) for thread, events in timeline.host.items()}
    names = _thread_names(timeline)
    nccl = [event for event in timeline.device if event.is_nccl]
    others = [event for event in timeline.device if not event.is_nccl]
    return {
        "steps": steps,
        "window_ms": (busy[-1][1] - busy[0][0]) / 1e3 / steps,
        "busy_ms": _per_step(busy, steps),
        "busy_without_nccl_ms": _per_step(union((e.start, e.end) for e in others), steps),
        "nccl_ms": _per_step(union((e.start, e.end) for e in nccl), steps),
        "kernels": sum(event.category == "kernel" for event in timeline.device) / steps,
        **_calls(timeline, steps),
        "idle_ms": _per_step(waits, steps),
        "idle_by_host_work": _meanwhile(waits, work, names, steps),
        **_ended(waits, timeline, work, names, steps),
    }


def _per_step(merged: Iterable[Interval], steps: int) -> float:
    return length(merged) / 1e3 / steps


def _thread_names(timeline: Timeline) -> dict[Thread, str]:
    names = {}
    for number, (thread, events) in enumerate(timeline.host.items()):
        names[thread] = f"thread {number}"
        if any(event.name == STEPS for event in events):
            names[thread] = "main"
        elif any(event.name.startswith(_BACKWARD) for event in events):
            names[thread] = "backward"
    return names


def _calls(timeline: Timeline, steps: int) -> dict[str, float]:
    """Launches and waits a step; a call of the driver inside one of the runtime is the same one."""
    calls: dict[Any, Event] = {}
    for thread, events in timeline.host.items():
        for index, event in enumerate(events):
            if event.category in RUNTIME:
                key = event.correlation
                calls.setdefault((thread, index) if key is None else key, event)

    def count(prefixes: tuple[str, ...]) -> float:
        return sum(event.name.startswith(prefixes) for event in calls.values()) / steps

    waited = sum(e.end - e.start for e in calls.values() if e.name.startswith(_WAIT))
    return {
        "kernel_launches": count(_KERNEL),
        "graph_launches": count(_GRAPH),
        "copies": count(_COPY),
        "sets": count(_SET),
        "waits": count(_WAIT),
        "waited_ms": waited / 1e3 / steps,
    }


def _meanwhile(
    waits: list[Interval],
    work: Mapping[Thread, HostWork],
    names: Mapping[Thread, str],
    steps: int,
) -> list[dict[str, Any]]:
    """Idle time by what each thread was in; threads run side by side, so rows overlap in time."""
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for thread, done in work.items():
        covered = 0.0
        stretches = [(segment.start, segment.end) for segment in done.segments]
        for _, index, duration in common(waits, stretches):
            segment = done.segments[index]
            sums[names[thread], segment.phase, segment.name] += duration
            covered += duration
        if names[thread] == "main":
            sums["main", OUTSIDE, OUTSIDE] += length(waits) - covered
    rows = sorted(sums.items(), key=lambda item: -item[1])[:LISTED]
    return [
        {"thread": thread, "phase": phase, "what": name, "ms": duration / 1e3 / steps}
        for (thread, phase, name), duration in rows
    ]


def _ended(
    waits: list[Interval],
    timeline: Timeline,
    work: Mapping[Thread, HostWork],
    names: Mapping[Thread, str],
    steps: int,
) -> dict[str, Any]:
    """Gaps by what ended them; see Note [Two ways to name a wait]."""
    launches = timeline.launches()
    begins: dict[float, Event] = {}
    for event in timeline.device:
        begins.setdefault(event.start, event)
    callers = {
        correlation: (names[thread], caller)
        for thread, done in work.items()
        for correlation, caller in done.callers.items()
    }
    rows: list[dict[str, Any]] = []
    sums: dict[tuple[str, str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    late = 0.0
    for start, end in waits:
        kernel = begins[end]
        correlation = -1 if kernel.correlation is None else kernel.correlation
        launch = launches.get(correlation)
        thread, caller = callers.get(correlation, _NOBODY)
        was_late = launch is not None and launch.start >= start
        late += (end - start) if was_late else 0.0
        row = {
            "us": end - start,
            "ended_by": shown(kernel.name)[:120],
            "launched_by": caller.operator,
            "phase": caller.phase,
            "thread": thread,
            "launched_late": was_late,
        }
        rows.append(row)
        cell = sums[thread, caller.phase, caller.operator, was_late]
        cell[0] += end - start
        cell[1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:LISTED]
    return {
        "gaps": len(waits) / steps,
        "idle_for_host_ms": late / 1e3 / steps,
        "longest_gaps": sorted(rows, key=lambda row: -row["us"])[:LISTED],
        "idle_by_launch": [
            {
                "thread": thread,
                "phase": phase,
                "launched_by": operator,
                "launched_late": was_late,
                "ms": total / 1e3 / steps,
                "gaps": count / steps,
            }
            for (thread, phase, operator, was_late), (total, count) in ordered
        ],
    }
