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
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_cg.tools.bench.traces.busy import busy_metrics
from megatron_cg.tools.bench.traces.intervals import covered_until, length
from megatron_cg.tools.bench.traces.timeline import OUTSIDE, Thread, Timeline, shown, spans

STEPS = "cg: steps"
"""The range around the profiled steps; it identifies the main thread."""
_BACKWARD = "autograd::engine::evaluate_function"
_LISTED = 15
"""The number of rows in a list."""
_LEAST = 1e-3
"""Microseconds; less than that comes from rounding."""


def analyse(timeline: Timeline, steps: int) -> dict[str, Any]:
    """The analysis of a trace with host events over ``steps`` steps; times in ms per step.

    Its metrics of the GPU are those of a slowed host: see Note [Two traces] in
    :mod:`megatron_cg.tools.bench.traces.busy`. Raises BenchError if the trace has no GPU work.
    """
    names = _thread_names(timeline)
    return {
        **busy_metrics(timeline, steps),
        "idle_by_launch": _by_launch(timeline, names, steps),
        "idle_by_host_work": _by_host_work(timeline, names, steps),
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


def _by_launch(timeline: Timeline, names: Mapping[Thread, str], steps: int) -> list[dict[str, Any]]:
    """Gaps by the call that ended them; see Note [Two ways to name a wait]."""
    groups: dict[tuple[str, str, str, bool], list[float]] = defaultdict(list)
    for gap in timeline.gaps:
        by = ("?", OUTSIDE, "?")
        if gap.launch is not None:
            by = (names[gap.launch.thread], gap.launch.phase, shown(gap.launch.inside))
        groups[*by, gap.launched_late].append(gap.length)
    return [
        {
            **{"thread": thread, "phase": phase, "launched_by": by, "launched_late": late},
            "ms": sum(lengths) / 1e3 / steps,
            "gaps": len(lengths) / steps,
        }
        for (thread, phase, by, late), lengths in sorted(
            groups.items(), key=lambda group: -sum(group[1])
        )[:_LISTED]
    ]


def _by_host_work(
    timeline: Timeline, names: Mapping[Thread, str], steps: int
) -> list[dict[str, Any]]:
    """Idle time by the event of each thread; threads run in parallel, so rows overlap in time.

    An event's own time is what lies in it less what lies in the events directly inside it.
    """
    waits = np.array([(gap.start, gap.end) for gap in timeline.gaps]).reshape(-1, 2)
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for thread, events in timeline.host.items():
        name = names[thread]
        idle = np.diff(covered_until(waits, spans(events)))[:, 0].tolist()
        for event, inside in zip(events, idle, strict=True):
            outer = event.inside
            sums[name, event.phase, shown(event)] += inside
            sums[name, outer.phase if outer else OUTSIDE, shown(outer)] -= inside
        # Only the main thread is known to be doing something, if only Python, at all times.
        sums[name, OUTSIDE, OUTSIDE] += length(waits) if name == "main" else 0.0
    rows = sorted(sums.items(), key=lambda item: -item[1])[:_LISTED]
    return [
        {"thread": thread, "phase": phase, "what": name, "ms": duration / 1e3 / steps}
        for (thread, phase, name), duration in rows
        if duration > _LEAST
    ]
