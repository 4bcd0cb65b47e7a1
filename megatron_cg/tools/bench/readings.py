"""Reads Megatron's log of a run. Pure.

Relied on: megatron-core 0.19.2, ``training_log``, ``report_memory`` and ``_print_args``.
"""

import re
import statistics
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
