"""Sets of moments, as sorted lists of (start, end) that do not touch. Pure; any unit of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Every moment that lies in one of ``intervals``; those without length are left out."""
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
    """How long all of them are together; of a union, so that no moment counts twice."""
    return sum(end - start for start, end in merged)


def gaps(merged: Sequence[Interval]) -> list[Interval]:
    """What lies between the first start and the last end and in none of them."""
    return [(before[1], after[0]) for before, after in pairwise(merged)]


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[tuple[int, int, float]]:
    """Where two sorted lists overlap: index in ``one``, index in ``other``, how long.

    Neither may overlap itself.
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
