"""Medians and spreads of repeated measurements, and linear fits of scaling runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.errors import MegatronCGError


class MetricsError(MegatronCGError):
    """The measurements do not contain what was requested."""


@dataclass(frozen=True)
class Spread:
    """The spread of one value that was measured ``count`` times."""

    count: int
    median: float
    low: float
    """First quartile (inclusive quartiles)."""
    high: float
    """Third quartile (inclusive quartiles)."""
    least: float
    most: float

    @property
    def between(self) -> float:
        """Interquartile range."""
        return self.high - self.low


def spread(values: Sequence[float]) -> Spread:
    """The spread of one or more values. Raises MetricsError if there is none."""
    if not values:
        raise MetricsError("there is no value to take a median of.")
    if len(values) == 1:
        return Spread(1, *([values[0]] * 5))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(len(values), median, low, high, min(values), max(values))


@dataclass(frozen=True)
class Line:
    """``offset + slope * x``, the least-squares fit, and the distance of the points from it."""

    offset: float
    slope: float
    residual: float
    """Largest distance of a point from the line, relative to the point's value."""

    def at(self, x: float) -> float:
        """The line's value."""
        return self.offset + self.slope * x


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through two or more points. Raises MetricsError if all have the same x."""
    xs = [x for x, _ in points]
    if len(set(xs)) < 2:
        raise MetricsError("a line needs points at two places at least.")
    slope, offset = statistics.linear_regression(xs, [y for _, y in points])
    line = Line(offset, slope, 0.0)
    away = [abs(line.at(x) - y) / abs(y) if y else abs(line.at(x)) for x, y in points]
    return Line(offset, slope, max(away))
