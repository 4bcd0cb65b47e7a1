"""Which room imports from which: a matrix, drawn from the imports of the package."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import grimp

from tools.drawings.svg import Drawing

PACKAGE = "megatron_cg"
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
_LABEL, _CELL, _ROW, _TOP = 130.0, 46.0, 28.0, 132.0


def levels() -> list[list[str]]:
    """The rooms by level, the highest first, as the import contract has them."""
    settings = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["containers"] == [PACKAGE])
    return [[room.strip() for room in level.split(":")] for level in contract["layers"]]


@cache
def imports() -> dict[str, frozenset[str]]:
    """The rooms that each room imports from, without imports for type checkers."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    rooms = [room for level in levels() for room in level]
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            room, other = _room(module), _room(imported)
            if room in found and other in found and room != other:
                found[room].add(other)
    return {room: frozenset(others) for room, others in found.items()}


def _room(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0]


def rooms() -> Drawing:
    """A row and a column for each room; a cell where the row's room imports from the column's."""
    names = [name for level in levels() for name in level]
    drawing = Drawing(
        _LABEL + _CELL * len(names) + 10,
        _TOP + _ROW * len(names) + 10,
        "Which room imports from which; every cell lies right of the diagonal, so from lower rooms",
    )
    for column, name in enumerate(names):
        # Names take turns on six lines, since a column is narrower than a name.
        x, y = _LABEL + _CELL * (column + 0.5), 14.0 + 17.0 * (column % 6)
        drawing.text(x, y, name, anchor="middle", style="soft")
        drawing.line([(x, y + 5), (x, _TOP - 4)], dash=True)
    for row, name in enumerate(names):
        y = _TOP + _ROW * row
        drawing.text(8, y + _ROW / 2 + 4, name, style="head")
        drawing.line([(_LABEL, y), (_LABEL + _CELL * len(names), y)])
        for column, other in enumerate(names):
            x = _LABEL + _CELL * column
            if row == column:
                drawing.box(x + 2, y + 2, _CELL - 4, _ROW - 4, "", kind="host")
            elif other in imports()[name]:
                drawing.box(x + 2, y + 2, _CELL - 4, _ROW - 4, "", kind="graph")
    return drawing
