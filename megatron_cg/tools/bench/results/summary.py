"""The short table at the end of ``megatron-cg bench``, with a verdict in words for each row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from megatron_cg.tools.bench.results.cells import heading, step_ratios
from megatron_cg.tools.bench.results.grids import NONE, Grid, filled, number, print_grid
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.runs.configurations import EAGER
from megatron_cg.tools.bench.runs.store import OK, Result

STEADY = (0.95, 1.05)
"""The range of the later to the earlier half of the timed steps in which steps are steady."""


def verdict(row: Row) -> str:
    """Whether this configuration is faster than its baseline, in a few words."""
    bad = next((result for result in row.rounds if result["status"] != OK), None)
    if row.metrics["step"] is None:
        return str(bad["status"]) if bad else "not measured"
    found = row.step_ratio(row.baseline)
    if row is row.baseline:
        words = "the baseline" if row.name == EAGER else "a baseline"
    elif found is None:
        words = f"no {row.baseline_name} to compare with"
    elif found.rounds > 1 and found.least <= 1 <= found.most:
        words = f"no clear difference in {found.rounds} rounds"
    else:
        percent = abs(1 - found.median)
        less = found.median < 1
        words = f"{percent:.1%} {'less' if less else 'more'} time a step"
        words += f" than {row.baseline_name}" if row.baseline_name != EAGER else ""
        if found.rounds < 2:
            words += ", of one round" if found.rounds else ", of another invocation"
    steadiness = row.metrics["later_per_earlier"]
    if steadiness is not None and not STEADY[0] <= steadiness <= STEADY[1]:
        words += "; steps are not steady"
    return f"{words}; a run {bad['status']}" if bad else words


def summary(rows: Sequence[Row]) -> Grid:
    """The short table of one shape and size."""
    return filled(
        [
            ("configuration", lambda row: row.name),
            ("step, ms", lambda row: number(row.metrics["step"])),
            *step_ratios(rows, to_itself=NONE),
            ("peak allocated, MiB", _memory),
            ("verdict", verdict),
        ],
        rows,
    )


def _memory(row: Row) -> str:
    text = number(row.metrics["peak_allocated"], ",.0f")
    ratio = row.ratio("peak_allocated")
    return text if ratio is None or row is row.baseline else f"{text} ({ratio:.3f})"


def print_summary(results: Sequence[Result], console: Console) -> None:
    """Print a table for each shape and size."""
    for rows in tables(results):
        first = rows[0].result
        print_grid(heading(first), summary(rows), console)
        if first.get("notice"):
            notice = f"{first['notice']}. Its times say nothing about a GPU."
            console.print(notice, markup=False, highlight=False, soft_wrap=True)
