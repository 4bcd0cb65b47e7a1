"""Shows how metrics grow with layers, microbatches and GPUs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.results.grids import grid, number
from megatron_cg.tools.bench.results.metrics import joined
from megatron_cg.tools.bench.runs.store import Result, by_configuration, slug

_GROWING = {
    "step": ("ms", "step"),
    "capture": ("s", "capture_seconds"),
    "capture without warmup": ("s", "capture_without_warmup"),
    "peak allocated": ("MiB", "peak_allocated"),
    "peak in capture": ("MiB", "capture_peak"),
}
"""The unit and the name of each metric."""


@dataclass(frozen=True)
class Trend:
    """One metric of one configuration over the values of one dimension."""

    shape: str
    grouped_gemm: str
    configuration: str
    dimension: str
    metric: str
    unit: str
    points: tuple[tuple[float, float], ...]
    offset: float
    """Of the least-squares line."""
    slope: float

    def at(self, x: float) -> float:
        """The line's value."""
        return self.offset + self.slope * x

    @property
    def residual(self) -> float:
        """Largest distance of a point from the line, relative to the point's value."""
        return max(abs(self.at(x) - y) / (abs(y) or 1.0) for x, y in self.points)


def trends(results: Sequence[Result]) -> list[Trend]:
    """A trend per measured metric, for every scaling run with two or more points."""
    groups: dict[str, list[list[Result]]] = {}
    for rounds in by_configuration(results):
        key = rounds[0]["key"]
        if key["dimension"]:
            of_all = slug({**key, "round": 1, key["dimension"]: "all"})
            groups.setdefault(of_all, []).append(rounds)
    return [trend for group in groups.values() for trend in _of_configuration(group)]


def _of_configuration(group: Sequence[Sequence[Result]]) -> list[Trend]:
    key = group[0][0]["key"]
    names = (key["shape"], key["grouped_gemm"], key["contender"], key["dimension"])
    sizes = [float(rounds[0]["key"][key["dimension"]]) for rounds in group]
    metrics = [joined(rounds) for rounds in group]
    found = []
    for title, (unit, name) in _GROWING.items():
        values = [one[name] for one in metrics]
        pairs = zip(sizes, values, strict=True)
        points = tuple(sorted((x, y) for x, y in pairs if y is not None))
        if len({x for x, _ in points}) > 1:
            slope, offset = statistics.linear_regression(*zip(*points, strict=True))
            found.append(Trend(*names, title, unit, points, offset, slope))
    return found


def trend_lines(found: Sequence[Trend]) -> list[str]:
    """The section of a report."""
    if not found:
        return []
    body = [
        [
            f"{trend.shape}, {trend.configuration}, {trend.metric} ({trend.unit})",
            trend.dimension,
            ", ".join(f"{x:g}: {y:,.1f}" for x, y in trend.points),
            number(trend.offset, ",.2f"),
            number(trend.slope, ",.3f"),
            number(trend.residual, ".1%"),
        ]
        for trend in found
    ]
    columns = ["metric", "by", "measured", "at 0", "for each", "farthest from the line"]
    return ["## Scaling", "", *grid(columns, body), ""]
