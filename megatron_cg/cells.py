"""Closure variables of other packages' functions, by name, and set with an undo."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any


def cells_of(function: Any) -> dict[str, CellType]:
    """What ``function`` keeps of enclosing functions; empty where it is no function."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))


def set_cell(cell: CellType, value: Any) -> Callable[[], None]:
    """Let functions that share a closure variable see ``value``; returns the undo."""
    old = cell.cell_contents
    cell.cell_contents = value

    def undo() -> None:
        cell.cell_contents = old

    return undo
