"""Formats Markdown tables and their numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "-"


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """One table's lines; the first column is text, the others numbers."""
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def number(value: float | None, form: str = ",.1f") -> str:
    """A formatted number, or a mark for a missing one."""
    return NONE if value is None else format(value, form)
