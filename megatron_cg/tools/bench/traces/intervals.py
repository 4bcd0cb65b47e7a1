"""Sets of times, as arrays of (start, end) rows. Pure; any time unit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def union(spans: Array) -> Array:
    """Disjoint rows in the order of time that cover the same moments; empty rows are dropped."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.ones(len(spans), bool)
    begins[1:] = spans[1:, 0] > ends[:-1]
    return np.column_stack([spans[begins, 0], ends[np.roll(begins, -1)]])


def length(merged: Array) -> float:
    """The total length; pass a union, so that no time counts twice."""
    return float(np.diff(merged).sum())


def gaps(merged: Array) -> Array:
    """The rows between the first start and the last end that a union does not cover."""
    return np.column_stack([merged[:-1, 1], merged[1:, 0]])


def covered_until(merged: Array, moments: Array) -> Array:
    """How much time of a union lies before each of ``moments``."""
    if not len(merged):
        return np.zeros_like(moments)
    ends = np.diff(merged).cumsum()
    before = np.column_stack([ends - np.diff(merged)[:, 0], ends])
    return np.interp(moments, merged.ravel(), before.ravel())
