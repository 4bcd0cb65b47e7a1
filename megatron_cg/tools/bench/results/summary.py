"""The short table at the end of ``megatron-cg bench``, with a verdict in words for each row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_cg.tools.bench.results import ablation
from megatron_cg.tools.bench.results.grids import NONE, number
from megatron_cg.tools.bench.results.markdown import heading
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.rounds_text import ratio_bases, ratio_cell, ratio_titles
from megatron_cg.tools.bench.runs.configurations import EAGER
from megatron_cg.tools.bench.runs.store import OK, Result

STEADY = (0.95, 1.05)
"""The range of the later to the earlier half of the timed steps in which steps are steady."""


def verdict(row: Row) -> str:
    """Whether this configuration is faster than its baseline, in a few words."""
    bad = next((result for result in row.rounds if result["status"] != OK), None)
    if row.metrics.step is None:
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
    steadiness = row.metrics.later_per_earlier
    if steadiness is not None and not STEADY[0] <= steadiness <= STEADY[1]:
        words += "; steps are not steady"
    return f"{words}; a run {bad['status']}" if bad else words


def summary_titles(rows: Sequence[Row]) -> list[str]:
    """The titles of the columns."""
    return ["configuration", "step, ms", *ratio_titles(rows), "peak allocated, MiB", "verdict"]


def summary_cells(row: Row) -> list[str]:
    """The row of one configuration."""
    metrics, base = row.metrics, row.baseline
    memory = number(metrics.peak_allocated, ",.0f")
    ratio = row.ratio(lambda found: found.peak_allocated)
    if ratio is not None and row is not base:
        memory += f" ({ratio:.3f})"
    return [
        row.name,
        number(metrics.step.median if metrics.step else None),
        *(NONE if row is to else ratio_cell(row.step_ratio(to)) for to in ratio_bases(row)),
        memory,
        verdict(row),
    ]


def print_summary(results: Sequence[Result], console: Console) -> None:
    """Print a table for each shape and size; without lines and colours if not to a terminal.

    Parts of the fast path that were left out have a table of their own.
    """
    for rows in tables(results):
        first = rows[0].result
        title = heading(first)
        _print_table(title, summary_titles(rows), [summary_cells(row) for row in rows], console)
        if losses := [loss.cells() for loss in ablation.losses(rows)]:
            _print_table(f"{title}: {ablation.TITLE}", ablation.COLUMNS, losses, console)
        if first.get("notice"):
            notice = f"{first['notice']}. Its times say nothing about a GPU."
            console.print(notice, markup=False, highlight=False, soft_wrap=True)


def _print_table(
    title: str, titles: Sequence[str], cells: Sequence[Sequence[str]], console: Console
) -> None:
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for column in titles:
            words = column in ("configuration", "verdict", "left out")
            table.add_column(column, justify="left" if words else "right")
        for row in cells:
            table.add_row(*row)
        console.print(table)
    else:
        for line in ("", title, *_aligned([titles, *cells])):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines with columns of equal width; the first and the last column start at the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for cells in lines:
        padded = [cells[0].ljust(widths[0])]
        inner = zip(cells[1:-1], widths[1:-1], strict=True)
        padded += [cell.rjust(width) for cell, width in inner]
        aligned.append("  ".join([*padded, cells[-1]]))
    return aligned
