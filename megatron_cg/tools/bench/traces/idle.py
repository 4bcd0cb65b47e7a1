"""Analyses what the host did while a GPU waited, from a trace with host events. Pure.

Note [Two ways to name a wait]
    While the GPU waits, some thread is working. So the first way counts each thread's innermost
    event over all idle time. But a gap ends with a kernel, and the host was about to launch just
    that kernel. So the second way assigns the gap to the call that ended it. If that kernel was
    launched before the GPU became idle, it waited for another stream or another rank; the host did
    not cause such a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cg.tools.bench.traces.busy import LISTED, Gap, busy_metrics, find_gaps, longest
from megatron_cg.tools.bench.traces.hostwork import OUTSIDE, Caller, HostWork
from megatron_cg.tools.bench.traces.intervals import Interval, common, length
from megatron_cg.tools.bench.traces.timeline import Thread, Timeline

STEPS = "cg: steps"
"""The range around the profiled steps; it identifies the main thread."""
_BACKWARD = "autograd::engine::evaluate_function"
_NOBODY = ("?", Caller("?", OUTSIDE))


def analyse(timeline: Timeline, steps: int) -> dict[str, Any]:
    """The analysis of a trace with host events over ``steps`` steps; times in ms per step.

    Its metrics of the GPU are those of a slowed host: see Note [Two traces] in
    :mod:`megatron_cg.tools.bench.traces.busy`. Raises MetricsError if the trace has no GPU work.
    """
    metrics = busy_metrics(timeline, steps)
    found = find_gaps(timeline)
    work = {thread: HostWork(events) for thread, events in timeline.host.items()}
    names = _thread_names(timeline)
    waits = [(gap.start, gap.end) for gap in found]
    return {
        **metrics,
        "idle_by_host_work": _meanwhile(waits, work, names, steps),
        **_ended(found, work, names, steps),
    }


def _thread_names(timeline: Timeline) -> dict[Thread, str]:
    names = {}
    for number, (thread, events) in enumerate(timeline.host.items()):
        names[thread] = f"thread {number}"
        if any(event.name == STEPS for event in events):
            names[thread] = "main"
        elif any(event.name.startswith(_BACKWARD) for event in events):
            names[thread] = "backward"
    return names


def _meanwhile(
    waits: list[Interval],
    work: Mapping[Thread, HostWork],
    names: Mapping[Thread, str],
    steps: int,
) -> list[dict[str, Any]]:
    """Idle time by the event of each thread; threads run in parallel, so rows overlap in time."""
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
    found: Sequence[Gap],
    work: Mapping[Thread, HostWork],
    names: Mapping[Thread, str],
    steps: int,
) -> dict[str, Any]:
    """Gaps by the call that ended them; see Note [Two ways to name a wait]."""
    callers = {
        correlation: (names[thread], caller)
        for thread, done in work.items()
        for correlation, caller in done.callers.items()
    }

    def caller_of(gap: Gap) -> tuple[str, Caller]:
        correlation = gap.ended_by.correlation
        return _NOBODY if correlation is None else callers.get(correlation, _NOBODY)

    sums: dict[tuple[str, str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for gap in found:
        thread, caller = caller_of(gap)
        cell = sums[thread, caller.phase, caller.operator, gap.launched_late]
        cell[0] += gap.length
        cell[1] += 1
    listed = []
    for gap in longest(found):
        thread, caller = caller_of(gap)
        by = {"launched_by": caller.operator, "phase": caller.phase, "thread": thread}
        listed.append(gap.row() | by)
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:LISTED]
    return {
        "longest_gaps": listed,
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
