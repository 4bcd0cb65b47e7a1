"""Closure variables of other packages' functions: found by name, and set with an undo."""

from __future__ import annotations

from functools import partial
from types import CellType
from typing import Any

from megatron_cg.upstream.patch import Place, Undo, change, described, passing


def _place(cell: CellType) -> Place:
    return Place(
        "a closure variable of Megatron-FSDP's or Transformer Engine's functions",
        "",
        (id(cell), ""),
        lambda: cell.cell_contents,
        partial(setattr, cell, "cell_contents"),
    )


def cells_of(function: Any) -> dict[str, CellType]:
    """The closure variables of ``function`` by name; empty if it is not a function."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))


def set_cell(cell: CellType, value: Any) -> Undo:
    """Set a closure variable for all functions that share it; returns the undo."""
    return change(_place(cell), value)


def put_over_cell(cell: CellType, function: Any) -> Undo:
    """Make functions that share a closure variable call ``function`` instead of its value.

    Returns the undo; see Note [Only what is still ours] in ``megatron_cg/upstream/patch.py``.
    """
    over, pass_on = passing(function, cell.cell_contents)
    restore = change(_place(cell), over, label=described(function))

    def undo() -> None:
        pass_on()
        restore()

    return undo
