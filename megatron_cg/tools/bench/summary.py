"""The headline of a table of results: step, ratio, memory, and the verdict in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cg.tools.bench.grids import number
from megatron_cg.tools.bench.metrics import Row
from megatron_cg.tools.bench.rounds import Ratio
from megatron_cg.tools.bench.rounds_text import ratio_cell, status_label

HEAD = (
    "configuration",
    "step ms, median",
    "of the baseline's",
    "peak allocated MiB",
    "of the baseline's",
    "verdict",
)
_DRIFT = 0.1
"""A machine may drift by this within minutes, so one round tells no smaller difference."""


def headline(rows: Sequence[Row]) -> list[list[str]]:
    """A row in the columns of ``HEAD`` for each of a table; the first is the baseline."""
    return [_headline(row, rows[0]) for row in rows]


def _headline(row: Row, baseline: Row) -> list[str]:
    step, peak = row.metrics.step, row.metrics.peak_allocated
    theirs = baseline.metrics.peak_allocated
    return [
        status_label(row),
        number(step.median if step else None),
        ratio_cell(row.step_ratio(baseline)),
        number(peak, ",.0f"),
        number(peak / theirs if peak and theirs else None, ".3f"),
        verdict(row, baseline),
    ]


def verdict(row: Row, baseline: Row) -> str:
    """What the step times say about ``row`` against ``baseline``, another row of its table."""
    if row.metrics.step is None:
        return "not measured"
    if row is baseline:
        return "the baseline"
    found = row.step_ratio(baseline)
    if found is None:
        return "the baseline was not measured"
    if not found.side_by_side:
        return "not run side by side with the baseline"
    one = found.rounds == 1
    faster = faster_or_slower(found, _DRIFT if one else 0.0)
    if not faster:
        return f"no clear difference in {'one round' if one else f'{found.rounds} rounds'}"
    factor = 1 / found.median if faster == "faster" else found.median
    where = "in one round" if one else f"in each of {found.rounds} rounds"
    return f"{faster} by a factor of {factor:.2f} {where}"


def faster_or_slower(found: Ratio, margin: float) -> str:
    """``faster`` or ``slower`` if every round says so, by more than ``margin``; else empty."""
    if found.most < 1 - margin:
        return "faster"
    return "slower" if found.least > 1 + margin else ""
