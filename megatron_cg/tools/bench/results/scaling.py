"""Shows how metrics grow with layers, microbatches and GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cg.tools.bench.results.metrics import Metrics, joined, step_median
from megatron_cg.tools.bench.results.rounds import by_configuration
from megatron_cg.tools.bench.runs.bench_schedule import of_all_rounds
from megatron_cg.tools.bench.runs.store import Result
from megatron_cg.tools.bench.traces.spreads import Line, fit

GROWING: dict[str, tuple[str, Callable[[Metrics], float | None]]] = {
    "step": ("ms", step_median),
    "capture": ("s", lambda found: found.capture_seconds),
    "capture without warmup": ("s", lambda found: found.capture_without_warmup),
    "peak allocated": ("MiB", lambda found: found.peak_allocated),
    "peak in capture": ("MiB", lambda found: found.capture_peak),
}


@dataclass(frozen=True)
class Trend:
    """One metric of one configuration over the values of one dimension, with a fitted line."""

    shape: str
    grouped_gemm: str
    configuration: str
    dimension: str
    metric: str
    unit: str
    points: tuple[tuple[float, float], ...]
    line: Line


def trends(results: Sequence[Result]) -> list[Trend]:
    """A trend per measured metric, for every scaling run with two or more points."""
    groups: dict[tuple[Any, ...], list[list[Result]]] = {}
    for rounds in by_configuration(results):
        key = of_all_rounds(rounds[0]["key"])
        if key["dimension"]:
            others = [v for name, v in key.items() if name not in (key["dimension"], "contender")]
            groups.setdefault((*others, key["contender"]), []).append(rounds)
    found = []
    for group in groups.values():
        for metric, (unit, read) in GROWING.items():
            points = _points(group, read)
            if len({x for x, _ in points}) > 1:
                key = group[0][0]["key"]
                names = (key["shape"], key["grouped_gemm"], key["contender"], key["dimension"])
                found.append(Trend(*names, metric, unit, points, fit(points)))
    return found


def _points(
    group: Sequence[Sequence[Result]], read: Callable[[Metrics], float | None]
) -> tuple[tuple[float, float], ...]:
    keys = [rounds[0]["key"] for rounds in group]
    sizes = [float(key[key["dimension"]]) for key in keys]
    pairs = [(size, read(joined(rounds))) for size, rounds in zip(sizes, group, strict=True)]
    return tuple(sorted((x, y) for x, y in pairs if y is not None))
