"""Measures one rank's steps window by window, and writes after each window."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_cg.files import write_text
from megatron_cg.tools.bench.measure.device import accelerator, memory, reset_peaks, synchronize
from megatron_cg.tools.bench.measure.sampling import SUFFIX, PySpy
from megatron_cg.tools.bench.measure.trace_phases import find_phases
from megatron_cg.tools.bench.measure.watching import PhaseRanges, PhaseTimes, watching
from megatron_cg.tools.bench.measure.windows import TRACED, Windows
from megatron_cg.tools.bench.traces.hostwork import PREFIX
from megatron_cg.tools.bench.traces.idle import STEPS
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

FORMAT = 1
_PACKAGES = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine", "mamba-ssm")
TRACES = ("device_trace.json", "trace.json")
"""Device events only, and with host events."""
Counts = Mapping[str, int]


class Window(Protocol):
    """Measures the steps of one kind."""

    def begin_step(self) -> None:
        """Called before each step; the GPU is idle before the first one."""

    def end_step(self) -> None:
        """Called when Megatron's train_step returns."""

    def close(self) -> dict[str, Any]:
        """Called after the last step, when the GPU is idle; returns the measurements, for JSON."""


class Measurement:
    """Call :meth:`before_step` and :meth:`after_step` around each step, then :meth:`close`.

    Args:
        windows: which steps are measured, and how.
        directory: where ``rank<N>.json`` is written.
        counts: the counters of this package's graphs, or None if there are none.
    """

    def __init__(
        self,
        windows: Windows,
        directory: Path,
        counts: Callable[[], Counts | None] = lambda: None,
    ) -> None:
        self._kinds = list(windows.kinds())
        self._native = windows.native
        self._directory = directory
        self._counts = counts
        self._rank = int(os.environ.get("RANK", "0"))
        self._step = 0
        self._kind = ""
        self._window: Window | None = None
        self._loss: Any = None
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "rank": self._rank,
            "versions": _versions(),
            "device": accelerator(),
            "captures": [],
            "finished": False,
        }

    def before_step(self) -> None:
        """Begin the next step, and a new window if one is due."""
        kind = self._kinds[self._step] if self._step < len(self._kinds) else ""
        if kind != self._kind:
            self._leave()
            self._enter(kind)
        self._step += 1
        if self._window is not None:
            self._window.begin_step()

    def after_step(self, loss: Any = None) -> None:
        """End the step; ``loss`` is a number or a tensor of one element, read much later."""
        if self._window is not None:
            self._window.end_step()
        self._loss = loss

    def close(self) -> None:
        """End the last window and write. Safe to call twice."""
        self._leave()
        self._enter("")
        self.data["finished"] = self._step >= len(self._kinds)
        self.write()

    def abandon(self, error: BaseException) -> None:
        """Write the finished windows; the window that the error ended is dropped."""
        self._window = None
        self.data["error"] = f"{type(error).__name__}: {error}"
        self.write()

    def captured(self, metrics: Mapping[str, Any]) -> None:
        """Record one capture and the number of steps before it."""
        self.data["captures"].append({"after_step": self._step, **metrics})

    def write(self) -> None:
        """Write ``rank<N>.json``; a reader never sees a partial file."""
        write_text(self._directory / f"rank{self._rank}.json", json.dumps(self.data, indent=1))

    def _enter(self, kind: str) -> None:
        self._kind = kind
        make: dict[str, Callable[[], Window]] = {
            "timed": lambda: Timed(self._counts),
            "probed": Probed,
        }
        if self._rank == 0:
            path, native = self._directory / f"samples{SUFFIX}", self._native
            make["sampled"] = lambda: Sampled(path, native=native)
            if torch.cuda.is_available():
                alone, whole = (self._directory / name for name in TRACES)
                if _device_events():
                    make[TRACED] = lambda: Profiled(alone, host=False)
                make["profiled"] = lambda: Profiled(whole, host=True)
        synchronize()
        self._window = make[kind]() if kind in make else None

    def _leave(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        synchronize()
        self.data[self._kind] = window.close()
        if self._kind == "timed" and self._loss is not None:
            self.data["timed"]["loss"] = float(self._loss)
        self.write()


class Timed:
    """Times, memory and counters, from the start of a step to the start of the next.

    Peak memory counts from here on, so it excludes capture and the first steps.
    """

    def __init__(self, counts: Callable[[], Counts | None]) -> None:
        reset_peaks()
        self._counts, self._before = counts, counts()
        self._starts: list[float] = []
        self._ends: list[float] = []

    def begin_step(self) -> None:
        """See :class:`Window`."""
        self._starts.append(time.perf_counter())

    def end_step(self) -> None:
        """See :class:`Window`."""
        self._ends.append(time.perf_counter())

    def close(self) -> dict[str, Any]:
        """See :class:`Window`."""
        marks = [*self._starts, time.perf_counter()]
        now, before = self._counts(), self._before
        inside = zip(self._starts, self._ends, strict=True)
        return {
            "step_ms": [(b - a) * 1e3 for a, b in pairwise(marks)],
            "train_step_ms": [(end - start) * 1e3 for start, end in inside],
            "memory": memory(),
            "counters": {name: now[name] - before[name] for name in now}
            if now is not None and before is not None
            else None,
        }


class Probed:
    """Host time by phase."""

    def __init__(self) -> None:
        found = find_phases()
        self._missing = found.missing
        self._times = PhaseTimes()
        self._steps = 0
        self._undo = ExitStack()
        self._undo.enter_context(watching(found.codes, self._times))
        self._began = time.perf_counter()

    def begin_step(self) -> None:
        """See :class:`Window`."""
        self._steps += 1

    def end_step(self) -> None:
        """See :class:`Window`."""

    def close(self) -> dict[str, Any]:
        """See :class:`Window`."""
        took = time.perf_counter() - self._began
        self._undo.close()
        return {
            "steps": self._steps,
            "step_ms": took * 1e3 / self._steps,
            "phases": self._times.per_step(self._steps),
            "not_there": self._missing,
        }


class Sampled:
    """A sampling profile of this process, written to ``path``."""

    def __init__(self, path: Path, *, native: bool = False) -> None:
        self._steps = 0
        self._sampler = PySpy(path, native=native)
        self._began = time.perf_counter()

    def begin_step(self) -> None:
        """See :class:`Window`."""
        self._steps += 1

    def end_step(self) -> None:
        """See :class:`Window`."""

    def close(self) -> dict[str, Any]:
        """See :class:`Window`."""
        took = time.perf_counter() - self._began
        facts = self._sampler.stop()
        return {"steps": self._steps, "step_ms": took * 1e3 / self._steps, **facts}


class Profiled:
    """A trace of torch.profiler, written to ``path``.

    Args:
        path: the output file.
        host: whether it includes host events and a range around each phase, which slow the host. If
            not, it has only the device's work and the CUDA calls.
    """

    def __init__(self, path: Path, *, host: bool) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self._path, self._steps = path, 0
        device = [ProfilerActivity.CUDA]
        found = find_phases() if host else None
        self._profile = profile(activities=[ProfilerActivity.CPU, *device] if host else device)
        self._profile.start()
        self._undo = ExitStack()
        if found is not None:
            self._undo.enter_context(record_function(STEPS))
            ranges = PhaseRanges(record_function, PREFIX)
            self._undo.enter_context(watching(found.codes, ranges))

    def begin_step(self) -> None:
        """See :class:`Window`."""
        self._steps += 1

    def end_step(self) -> None:
        """See :class:`Window`."""

    def close(self) -> dict[str, Any]:
        """See :class:`Window`."""
        self._undo.close()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return {"steps": self._steps, "trace": self._path.name}


def _device_events() -> bool:
    """Whether torch can trace the device (needs CUPTI); if not, a device-only trace raises."""
    from torch.profiler import ProfilerActivity, supported_activities

    return ProfilerActivity.CUDA in supported_activities()


def _versions() -> dict[str, str | None]:
    found = {name: installed_version(name) for name in _PACKAGES}
    return found | {"megatron-cg": __version__}
