"""What is measured in the steps of each kind.

Each function is called before the first step of its kind, when the GPU is idle. It returns what is
called after the last one, when the GPU is idle again, and returns the measurements, for JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench.measure.device import memory, reset_peaks
from megatron_cg.tools.bench.measure.sampling import start_sampling
from megatron_cg.tools.bench.measure.trace_phases import find_phases
from megatron_cg.tools.bench.measure.watching import PhaseTimes, watching
from megatron_cg.tools.bench.traces.idle import STEPS
from megatron_cg.tools.bench.traces.timeline import PREFIX

Counts = Callable[[], Mapping[str, int] | None]
"""The counters of this package's graphs, or None if there are none."""


@dataclass
class Steps:
    """When the steps of one kind began, and when the last one had ended, in seconds."""

    starts: list[float] = field(default_factory=list)
    end: float = 0.0

    def mean(self) -> dict[str, float]:
        """The number of steps, and how long one of them took."""
        took = (self.end - self.starts[0]) * 1e3
        return {"steps": len(self.starts), "step_ms": took / len(self.starts)}


Finish = Callable[[Steps], dict[str, Any]]


def timed(counts: Counts) -> Finish:
    """Times, memory and counters, from the start of a step to the start of the next.

    Peak memory counts from here on, so it excludes capture and the first steps.
    """
    reset_peaks()
    before = counts()

    def finish(steps: Steps) -> dict[str, Any]:
        now = counts()
        found: dict[str, Any] = {
            "step_ms": [(b - a) * 1e3 for a, b in pairwise([*steps.starts, steps.end])],
            "memory": memory(),
            "counters": None,
        }
        if now is not None and before is not None:
            found["counters"] = {name: now[name] - before[name] for name in now}
        return found

    return finish


def probed() -> Finish:
    """Host time by phase."""
    codes, missing = find_phases()
    times = PhaseTimes()
    undo = ExitStack()
    undo.enter_context(watching(codes, times))

    def finish(steps: Steps) -> dict[str, Any]:
        undo.close()
        phases = times.per_step(len(steps.starts))
        return {**steps.mean(), "phases": phases, "not_there": missing}

    return finish


def sampled(path: Path, *, native: bool) -> Finish:
    """A sampling profile of this process, written to ``path``."""
    stop = start_sampling(path, native=native)
    return lambda steps: steps.mean() | stop()


def traced(path: Path, *, host: bool) -> Finish:
    """A trace of torch.profiler, written to ``path``.

    Args:
        path: the output file.
        host: whether it includes host events and a range around each phase, which slow the host. If
            not, it has only the device's work and the CUDA calls.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    device = [ProfilerActivity.CUDA]
    profiler = profile(activities=[ProfilerActivity.CPU, *device] if host else device)
    profiler.start()
    undo = ExitStack()
    if host:
        codes, _ = find_phases()
        ranges = PhaseTimes(lambda phase: record_function(PREFIX + phase))
        undo.enter_context(record_function(STEPS))
        undo.enter_context(watching(codes, ranges))

    def finish(steps: Steps) -> dict[str, Any]:
        undo.close()
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        return {"steps": len(steps.starts), "trace": path.name}

    return finish


def can_trace_device() -> bool:
    """Whether torch can trace the device (needs CUPTI); if not, a device-only trace raises."""
    from torch.profiler import ProfilerActivity, supported_activities

    return ProfilerActivity.CUDA in supported_activities()
