"""The table of features beside graphs, from ``tools/refusals``."""

from __future__ import annotations

from tools.generated.flags import in_code
from tools.generated.tables import table
from tools.refusals.registry import ROWS
from tools.refusals.row import Row

_HEAD = ("feature", "with layerwise graphs", "why, or how", "shown by", "in the released packages")


def features() -> str:
    """A row for each feature: supported or refused, why, what shows it, and upstream's lines."""
    return table(_HEAD, map(_cells, ROWS))


def _cells(row: Row) -> tuple[str, ...]:
    tests = "<br>".join(f"`{name}`" for name in row.tests)
    lines = "<br>".join(map(str, row.lines))
    return row.feature, row.status, in_code(row.why), tests or "—", lines or "—"
