"""Reads a trace of torch.profiler: how long the GPU was busy, and with what. Pure.

Relied on: torch 2.11's ``export_chrome_trace``: ``traceEvents`` with ``ph`` "X", ``cat``, and
``ts`` and ``dur`` in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench import BenchError

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LISTED = 10


def read_trace(path: Path, steps: int) -> dict[str, Any]:
    """What the GPU did in a trace of ``steps`` steps: milliseconds, and calls, per step.

    NCCL is exposed while its kernels run and nothing else does. Kernels are listed by their time,
    the largest first. Raises BenchError if the trace is missing or has no work of a GPU.
    """
    if not path.is_file():
        raise BenchError("the profiler left no trace: did the run reach its profiled steps?")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE]
    if not work:
        raise BenchError("the trace has no kernel: was it made on a GPU?")
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in work:
        spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    busy = _covered(chain.from_iterable(spans.values()))
    others = (found for name, found in spans.items() if "nccl" not in name.lower())
    kernels: list[dict[str, Any]] = [
        {"name": name, "ms": _summed(found) / 1e3 / steps, "calls": len(found) / steps}
        for name, found in spans.items()
    ]
    return {
        "busy_ms": busy / 1e3 / steps,
        "exposed_nccl_ms": (busy - _covered(chain.from_iterable(others))) / 1e3 / steps,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"])[:_LISTED],
    }


def _summed(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
