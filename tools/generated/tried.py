"""The table of versions with which the tape's alignment and the contract tests were run."""

from __future__ import annotations

import json

from tools.generated.tables import table
from tools.try_versions import CHECKS, PACKAGES, TRIED


def tried() -> str:
    """A row for each combination in ``requirements/tried.json``."""
    rows = json.loads(TRIED.read_text(encoding="utf-8"))
    return table([*PACKAGES, *CHECKS], (_cells(row) for row in rows))


def _cells(row: dict[str, str]) -> list[str]:
    versions = [row[name] for name in PACKAGES]
    if row["installs"] != "ok":
        return [*versions, row["installs"], *("—" for _ in list(CHECKS)[1:])]
    return [*versions, *(row[name].removeprefix("ok: ") for name in CHECKS)]
