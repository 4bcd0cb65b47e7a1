"""What the host did while a GPU waited, from a trace with host events. Pure.

Note [Two ways to name a wait]
    While the GPU waits, some thread is at work: each one's innermost event is counted over all
    idle time. But what ends a gap is a kernel, and the host was on its way to launching just that
    one, so a gap is also put down to the call that ended it. A kernel that had been launched
    before the GPU fell idle waited for something else, another stream or another rank; such gaps
    are not the host's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cg.tools.bench.busy import LISTED, Gap, busy_figures, find_gaps, longest
from megatron_cg.tools.bench.hostwork import OUTSIDE, Caller, HostWork
from megatron_cg.tools.bench.intervals import Interval, common, length
from megatron_cg.tools.bench.timeline import Thread, Timeline

STEPS = "cg: steps"
"""The range around the profiled steps, by which the main thread is known."""
_BACKWARD = "autograd::engine::evaluate_function"
_NOBODY = ("?", Caller("?", OUTSIDE))


def analyse(timeline: Timeline, steps: int) -> dict[str, Any]:
    """All that a trace with host events says of that many steps; times in milliseconds a step.

    What it says of the GPU alone is of a slowed host: see Note [Two traces] in
    :mod:`megatron_cg.tools.bench.busy`. Raises FiguresError where no work of a GPU is in it.
    """
    figures = busy_figures(timeline, steps)
    found = find_gaps(timeline)
    work = {thread: HostWork(events) for thread, events in timeline.host.items()}
    names = _thread_names(timeline)
    waits = [(gap.start, gap.end) for gap in found]
    return {
        **figures,
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
    found: Sequence[Gap],
    work: Mapping[Thread, HostWork],
    names: Mapping[Thread, str],
    steps: int,
) -> dict[str, Any]:
    """Gaps by what ended them; see Note [Two ways to name a wait]."""
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
