"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars and line ends in cells are kept out of its way."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    """``value`` as code, or a dash for what is empty or absent."""
    if value is None or value in ((), ""):
        return "—"
    words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{words}`"
