"""Reads a trace of torch.profiler as events of the device and of each host thread. Pure.

Relied on: torch 2.11's ``export_chrome_trace`` (Kineto): ``traceEvents`` with ``ph`` "X", ``ts``
and ``dur`` in microseconds, ``cat``, and ``args.correlation``, which a launch shares with the work
that it launched. All kernels of one graph have the correlation of its launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.traces.intervals import Array, gaps, union

PREFIX = "cg: "
"""Prefix of every range that the benchmark itself adds to a trace."""
OUTSIDE = "outside any phase"
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
HOST = RUNTIME | {"cpu_op", "user_annotation"}
Thread = tuple[str, str]


@dataclass(eq=False, slots=True)
class Event:
    """Something that took time; ``start`` and ``end`` in microseconds of the trace's clock."""

    name: str
    category: str
    start: float
    end: float
    thread: Thread
    correlation: int | None = None
    inside: Event | None = None
    """The innermost event around it on the same host thread."""

    @property
    def is_nccl(self) -> bool:
        """Whether this is an NCCL kernel; it may wait for other ranks."""
        return self.category == "kernel" and "nccl" in self.name.lower()

    @property
    def phase(self) -> str:
        """The innermost range of the benchmark that it lies in, or is, without the prefix."""
        event: Event | None = self
        while event is not None and not event.name.startswith(PREFIX):
            event = event.inside
        return shown(event)


def shown(event: Event | None) -> str:
    """An event's name as shown in tables."""
    return OUTSIDE if event is None else event.name.removeprefix(PREFIX)


def spans(events: Iterable[Event]) -> Array:
    """Their starts and ends."""
    return np.array([(event.start, event.end) for event in events], float).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Gap:
    """A period in which the GPU had nothing to do."""

    start: float
    end: float
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


@dataclass
class Timeline:
    """One process's events; each list is sorted by start."""

    device: list[Event] = field(default_factory=list)
    host: dict[Thread, list[Event]] = field(default_factory=dict)
    calls: dict[int, Event] = field(default_factory=dict)
    """The host's CUDA calls by correlation. A call of the driver inside one of the runtime, with
    the same correlation, is the same call."""

    @cached_property
    def gaps(self) -> list[Gap]:
        """The device's gaps in the order of time."""
        first_at: dict[float, Event] = {}
        for event in self.device:
            first_at.setdefault(event.start, event)
        found = []
        for start, end in gaps(union(spans(self.device))).tolist():
            correlation = first_at[end].correlation
            launch = None if correlation is None else self.calls.get(correlation)
            found.append(Gap(start, end, launch))
        return found


def read_timeline(path: Path) -> Timeline:
    """The timeline in a trace file. Raises BenchError for anything else."""
    try:
        trace = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} is not a trace that can be read: {error}") from error
    return parse_timeline(trace)


def parse_timeline(trace: Mapping[str, Any]) -> Timeline:
    """The timeline of a trace in Chrome's format. Raises BenchError if it has none."""
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list):
        raise BenchError("the trace has no list traceEvents: it is not from torch.profiler.")
    timeline = Timeline()
    for raw in events:
        category = raw.get("cat")
        if raw.get("ph") == "X" and category in DEVICE | HOST:
            event = _event(raw, category)
            on_host = timeline.host.setdefault(event.thread, []) if category in HOST else None
            (timeline.device if on_host is None else on_host).append(event)
    for listed in (timeline.device, *timeline.host.values()):
        listed.sort(key=lambda event: (event.start, -event.end))
    for listed in timeline.host.values():
        _nest(listed)
        for event in listed:
            if event.category in RUNTIME and event.correlation is not None:
                timeline.calls.setdefault(event.correlation, event)
    return timeline


def _event(raw: Mapping[str, Any], category: str) -> Event:
    start = float(raw["ts"])
    end = start + float(raw.get("dur", 0))
    thread = (str(raw.get("pid")), str(raw.get("tid")))
    return Event(
        str(raw["name"]), category, start, end, thread, raw.get("args", {}).get("correlation")
    )


def _nest(events: Iterable[Event]) -> None:
    """Set what each event of one thread lies in."""
    around: list[Event] = []
    for event in events:
        while around and around[-1].end <= event.start:
            around.pop()
        if around:
            event.inside = around[-1]
            # Events nest; an end beyond the outer one comes from the clock's resolution.
            event.end = min(event.end, around[-1].end)
        around.append(event)
