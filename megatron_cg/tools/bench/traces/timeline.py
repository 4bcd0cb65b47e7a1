"""Reads a trace of torch.profiler as events of the device and of each host thread. Pure.

Relied on: torch 2.11's ``export_chrome_trace`` (Kineto): ``traceEvents`` with ``ph`` "X", ``ts``
and ``dur`` in microseconds, ``cat``, and ``args.correlation``, which a launch shares with the work
that it launched. All kernels of one graph have the correlation of its launch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench.traces.spreads import MetricsError

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
HOST = RUNTIME | {"cpu_op", "user_annotation"}
Thread = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time; ``start`` and ``end`` in microseconds of the trace's clock."""

    name: str
    category: str
    start: float
    end: float
    correlation: int | None = None

    @property
    def is_nccl(self) -> bool:
        """Whether this is an NCCL kernel; it may wait for other ranks."""
        return self.category == "kernel" and "nccl" in self.name.lower()


@dataclass
class Timeline:
    """One process's events; each list is sorted by start."""

    device: list[Event] = field(default_factory=list)
    host: dict[Thread, list[Event]] = field(default_factory=dict)

    def launches(self) -> dict[int, Event]:
        """The host's CUDA calls by correlation."""
        calls = (event for events in self.host.values() for event in events)
        return {
            event.correlation: event
            for event in calls
            if event.category in RUNTIME and event.correlation is not None
        }


def read_timeline(path: Path) -> Timeline:
    """The timeline in a trace file, gzipped or not. Raises MetricsError for anything else."""
    try:
        text = path.read_bytes()
        if path.suffix == ".gz":
            text = gzip.decompress(text)
        trace = json.loads(text)
    except (OSError, ValueError) as error:
        raise MetricsError(f"{path} is not a trace that can be read: {error}") from error
    return parse_timeline(trace)


def parse_timeline(trace: Mapping[str, Any]) -> Timeline:
    """The timeline of a trace in Chrome's format. Raises MetricsError if it has none."""
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list):
        raise MetricsError("the trace has no list traceEvents: it is not from torch.profiler.")
    timeline = Timeline()
    for raw in events:
        category = raw.get("cat")
        if raw.get("ph") != "X" or category not in DEVICE | HOST:
            continue
        event = _event(raw, category)
        if category in DEVICE:
            timeline.device.append(event)
        else:
            thread = (str(raw.get("pid")), str(raw.get("tid")))
            timeline.host.setdefault(thread, []).append(event)
    for listed in (timeline.device, *timeline.host.values()):
        listed.sort(key=lambda event: (event.start, -event.end))
    return timeline


def _event(raw: Mapping[str, Any], category: str) -> Event:
    start = float(raw["ts"])
    end = start + float(raw.get("dur", 0))
    return Event(str(raw["name"]), category, start, end, raw.get("args", {}).get("correlation"))
