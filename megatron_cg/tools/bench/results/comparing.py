"""Compares two sets of results, metric by metric. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.results.metrics import Metrics, joined, step_median
from megatron_cg.tools.bench.results.rounds import by_configuration
from megatron_cg.tools.bench.runs.bench_schedule import of_all_rounds, slug
from megatron_cg.tools.bench.runs.store import Result, newest

COMPARED: dict[str, Callable[[Metrics], float | None]] = {
    "step ms": step_median,
    "step / busy": lambda found: found.step_per_busy,
    "GPU busy ms": lambda found: found.busy,
    "kernel launches": lambda found: found.kernel_launches,
    "peak allocated MiB": lambda found: found.peak_allocated,
    "peak reserved MiB": lambda found: found.peak_reserved,
    "capture s": lambda found: found.capture_seconds,
    "peak in capture MiB": lambda found: found.capture_peak,
    "bytes a replay": lambda found: found.bytes_per_replay,
}
_OF_TRACE = ("step / busy", "GPU busy ms")


@dataclass(frozen=True)
class Change:
    """One metric of one run, old and new."""

    name: str
    metric: str
    old: float
    new: float

    @property
    def ratio(self) -> float | None:
        """Old over new; above 1 the new value is smaller."""
        return self.old / self.new if self.new else None


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Every metric that both have, for configurations at the same point, over all rounds."""
    before = _by_name(old)
    changes = []
    for name, now in _by_name(new).items():
        if name not in before:
            continue
        for metric, read in COMPARED.items():
            was, is_now = read(before[name]), read(now)
            if was is not None and is_now is not None:
                told = metric + _difference(metric, before[name], now)
                changes.append(Change(name, told, was, is_now))
    return changes


def _difference(metric: str, old: Metrics, new: Metrics) -> str:
    """Why an old and a new metric are not comparable. See Note [Which trace] in metrics.py."""
    if metric not in _OF_TRACE or old.device_alone == new.device_alone:
        return ""
    return f" ({'old' if new.device_alone else 'new'}: traced with host events)"


def _by_name(results: Sequence[Result]) -> dict[str, Metrics]:
    groups = by_configuration(newest(results))
    return {slug(of_all_rounds(rounds[0]["key"])): joined(rounds) for rounds in groups}
