"""Reads what Megatron prints about its steps, and makes numbers of it. Pure.

Relied on: megatron-core 0.19.2, ``training_log``, ``report_memory`` and ``_print_args``.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
_PEAKS = (("H100 80GB HBM3", 989.0), ("GH200", 989.0), ("H200", 989.0), ("A100", 312.0))
"""Dense BF16 TFLOP/s by a part of the GPU's name, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Measured:
    """The timed steps of one run, on all ranks."""

    step_ms: list[float]
    tflops: list[float]
    """Per GPU, as Megatron counts operations."""
    tokens: float | None
    """Per second and GPU, in a step of median length; None if the log has not the sizes."""
    allocated_mib: float | None
    """Peak of torch's allocator since the start of the run, the maximum over the printed ranks."""
    reserved_mib: float | None
    loss: float | None
    """After the last step."""

    @property
    def median_ms(self) -> float:
        """The median step."""
        return statistics.median(self.step_ms)


def read_log(text: str, *, settle: int, steps: int) -> Measured:
    """What a run's log says of the steps after the first ``settle`` ones.

    Raises BenchError if fewer than ``steps`` steps follow.
    """
    lines = list(_STEP.finditer(text))
    timed = lines[settle:]
    if len(timed) < steps:
        raise BenchError(
            f"the log has {len(lines)} steps, and {settle} + {steps} were asked for: give a "
            "smaller --settle-steps or --steps, or a longer training"
        )
    timed = timed[:steps]
    times = [float(line["ms"]) for line in timed]
    sizes = {name: int(number) for name, number in _ARGUMENT.findall(text)}
    tokens = None
    if len(sizes) == 2:
        batch = int(timed[-1]["batch"]) * sizes["seq_length"] / sizes["world_size"]
        tokens = batch / statistics.median(times) * 1e3
    peaks = list(_MEMORY.finditer(text))
    return Measured(
        step_ms=times,
        tflops=[float(line["tflops"]) for line in timed if line["tflops"]],
        tokens=tokens,
        allocated_mib=max((float(peak["allocated"]) for peak in peaks), default=None),
        reserved_mib=max((float(peak["reserved"]) for peak in peaks), default=None),
        loss=float(timed[-1]["loss"]) if timed[-1]["loss"] else None,
    )


def peak_tflops(gpu: str) -> float | None:
    """The dense BF16 peak of a GPU by its name; None for an unknown one."""
    return next((peak for name, peak in _PEAKS if name in gpu), None)


def summary(
    rounds: Sequence[Measured], ratios: Sequence[float], peak: float | None
) -> dict[str, Any]:
    """The numbers of one configuration over its rounds; None for what the logs have not.

    Args:
        rounds: of the configuration, at least one.
        ratios: its median steps to those of the first configuration, one for each round that has
            both.
        peak: of the GPU, in TFLOP/s.
    """
    times = [time for one_round in rounds for time in one_round.step_ms]
    tflops = _median([value for one_round in rounds for value in one_round.tflops])
    first, third = _quartiles(times)
    return {
        "ms": statistics.median(times),
        "ms_quartiles": [first, third],
        "ms_of_rounds": [one_round.median_ms for one_round in rounds],
        "tflops": tflops,
        "mfu": tflops / peak if tflops is not None and peak else None,
        "tokens": _median([item.tokens for item in rounds if item.tokens is not None]),
        "allocated_mib": max((r.allocated_mib for r in rounds if r.allocated_mib), default=None),
        "reserved_mib": max((r.reserved_mib for r in rounds if r.reserved_mib), default=None),
        "ratio": _median(ratios),
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
    }


def as_json(measured: Measured) -> dict[str, Any]:
    """For JSON."""
    return asdict(measured)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third
