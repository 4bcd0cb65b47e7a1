"""Sets of times as sorted lists of disjoint (start, end) intervals. Pure; any time unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals``; empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(merged: Iterable[Interval]) -> float:
    """The total length; pass a union, so that no time counts twice."""
    return sum(end - start for start, end in merged)


def gaps(merged: Sequence[Interval]) -> list[Interval]:
    """The intervals between the first start and the last end that ``merged`` does not cover."""
    return [(before[1], after[0]) for before, after in pairwise(merged)]


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[tuple[int, int, float]]:
    """The overlaps of two sorted lists: index in ``one``, index in ``other``, length.

    The intervals within each list must be disjoint.
    """
    found = []
    first = second = 0
    while first < len(one) and second < len(other):
        start = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if start < end:
            found.append((first, second, end - start))
        if one[first][1] <= other[second][1]:
            first += 1
        else:
            second += 1
    return found
