"""Computes from a trace how busy a GPU was and how long it waited. Pure.

Note [Two traces]
    Host events in a trace, and ranges around phases, slow down the host. It then falls behind the
    GPU, although without them it is well ahead. So the GPU waits, and collectives overlap with
    nothing. Metrics of the GPU therefore come from a trace with device events only. Its steps are
    nearly as long as the timed ones. Of the host it has only the CUDA calls. ``idle.py`` analyses
    what the host did while the GPU waited, from another trace.
"""

from __future__ import annotations

from typing import Any

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.traces.intervals import length, union
from megatron_cg.tools.bench.traces.timeline import Timeline, spans

_KERNEL = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")
_GRAPH = ("cudaGraphLaunch", "cuGraphLaunch")


def busy_metrics(timeline: Timeline, steps: int) -> dict[str, Any]:
    """Metrics of the GPU from a trace of that many steps; times in milliseconds per step.

    NCCL is exposed while its kernels run and no other kernel, copy or memset does. Metrics of the
    host's calls are left out if the trace has none.

    Raises BenchError if the trace has no GPU work.
    """
    busy = union(spans(timeline.device))
    if not len(busy):
        raise BenchError("there is no kernel in the trace: was it made on a GPU?")
    others = union(spans(event for event in timeline.device if not event.is_nccl))
    nccl = union(spans(event for event in timeline.device if event.is_nccl))
    found = timeline.gaps
    times = {
        "window_ms": busy[-1, 1] - busy[0, 0],
        "busy_ms": length(busy),
        "busy_without_nccl_ms": length(others),
        "nccl_ms": length(nccl),
        "exposed_nccl_ms": length(busy) - length(others),
        "idle_ms": sum(gap.length for gap in found),
    }
    counts = {
        "kernels": sum(event.category == "kernel" for event in timeline.device),
        "gaps": len(found),
    }
    if timeline.calls:
        names = [call.name for call in timeline.calls.values()]
        counts["kernel_launches"] = sum(name.startswith(_KERNEL) for name in names)
        counts["graph_launches"] = sum(name.startswith(_GRAPH) for name in names)
        times["idle_for_host_ms"] = sum(gap.length for gap in found if gap.launched_late)
    return {
        "steps": steps,
        **{name: time / 1e3 / steps for name, time in times.items()},
        **{name: count / steps for name, count in counts.items()},
        "longest_gap_ms": max((gap.length for gap in found), default=0.0) / 1e3,
    }
