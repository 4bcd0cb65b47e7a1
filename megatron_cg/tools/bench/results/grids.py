"""A table as titles and cells: filled from rows, written as Markdown, printed on a terminal.

A page renders the same titles and cells with a macro of its template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

NONE = "-"
_WORDS = ("configuration", "verdict", "left out")
"""Columns of text when printed; the others are numbers."""


class Grid(NamedTuple):
    """The titles of the columns, and the cells of each row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def filled[R](columns: Sequence[tuple[str, Callable[[R], str]]], rows: Iterable[R]) -> Grid:
    """The grid of columns, each a title and the cell of a row."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return Grid([title for title, _ in columns], cells)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines; the first column is text, the others numbers."""
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def print_grid(title: str, found: Grid, console: Console) -> None:
    """Print it; to a file or pipe as plain text, without lines and as wide as it is."""
    lines = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(box=lines, title=title, title_justify="left", pad_edge=console.is_terminal)
    for column in found.columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    for row in found.rows:
        table.add_row(*row)
    if console.is_terminal:
        console.print(table)
        return
    table.title = None
    plain = Console(width=10_000, force_terminal=False)
    with plain.capture() as text:
        plain.print(table)
    for line in ("", title, *text.get().splitlines()):
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def number(value: float | None, form: str = ",.1f") -> str:
    """A formatted number, or a mark for a missing one."""
    return NONE if value is None else format(value, form)
