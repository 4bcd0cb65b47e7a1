"""Reads what a run left: Megatron's log, and a trace of torch.profiler. Pure.

Relied on: megatron-core 0.19.2, ``training_log``, ``report_memory`` and ``_print_args``; torch
2.11's ``export_chrome_trace``: ``traceEvents`` with ``ph`` "X", ``cat``, and ``ts`` and ``dur`` in
microseconds.
"""

import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench import BenchError

# Ranks write to one log, so nothing is asked of the beginnings of lines.
_STEP = re.compile(
    r" iteration +(?P<iteration>\d+)/ *\d+ \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \|)?.*"
    r" global batch size: +(?P<batch>\d+) \|(?:.* lm loss: (?P<loss>\S+) \|)?"
)
_MEMORY = re.compile(
    r"memory \(MB\) .*\| max allocated: (?P<allocated>[\d.]+)"
    r" .*\| max reserved: (?P<reserved>[\d.]+)"
)
_ARGUMENT = re.compile(r"\b(seq_length|world_size) \.{2,} (\d+)")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LISTED = 10


def read_log(text: str, *, settle: int, steps: int, every: int = 1) -> dict[str, Any]:
    """What a run's log says of ``steps`` steps after the first ``settle`` ones, for JSON.

    ``step_ms`` and ``tflops`` (per GPU, as Megatron counts operations) of each line, the mean of
    ``every`` so many steps, none of them a first one; ``tokens`` per second and GPU in a step of
    median length; ``allocated_mib`` and ``reserved_mib`` (the peaks of torch's allocator since the
    start, on the printed rank that has most); and the last ``loss``. What the log has not is None.
    Raises BenchError if it has fewer steps.
    """
    lines = list(_STEP.finditer(text))
    begin, end = settle + every, settle + steps
    timed = [line for line in lines if begin <= int(line["iteration"]) <= end]
    if not timed or len(timed) < end // every - (begin - 1) // every:
        raise BenchError(
            f"the log has {len(lines)} steps, and {settle} + {steps} were asked for: give a "
            "smaller --settle-steps or --steps, or a longer training"
        )
    times = [float(line["ms"]) for line in timed]
    sizes = {name: int(number) for name, number in _ARGUMENT.findall(text)}
    tokens = None
    if len(sizes) == 2:
        batch = int(timed[-1]["batch"]) * sizes["seq_length"] / sizes["world_size"]
        tokens = batch / statistics.median(times) * 1e3
    peaks = list(_MEMORY.finditer(text))
    return {
        "step_ms": times,
        "tflops": [float(line["tflops"]) for line in timed if line["tflops"]],
        "tokens": tokens,
        "allocated_mib": max((float(peak["allocated"]) for peak in peaks), default=None),
        "reserved_mib": max((float(peak["reserved"]) for peak in peaks), default=None),
        "loss": float(timed[-1]["loss"]) if timed[-1]["loss"] else None,
    }


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
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
