"""Rows of a record that grows for weeks, in little memory.

A row is written once and read when the file is. As dictionaries, the rows of 200,000 steps take 305
MiB; as compressed text a tenth of that.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

_TOGETHER = 1000
"""How many rows are compressed together."""


class Rows:
    """Rows that JSON can hold. Only the last one may still change."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._open: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._packed) * _TOGETHER + len(self._open)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; those before it change no more."""
        if len(self._open) == _TOGETHER:
            self._packed.append(zlib.compress(_text(self._open).encode()))
            self._open.clear()
        self._open.append(row)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last row; None if there is none."""
        return self._open[-1] if self._open else None

    @property
    def held_bytes(self) -> int:
        """What the compressed rows take."""
        return sum(map(len, self._packed))

    def text(self) -> str:
        """All rows, as a list in JSON."""
        parts = [zlib.decompress(pack).decode() for pack in self._packed]
        if self._open:
            parts.append(_text(self._open))
        return f"[{', '.join(parts)}]"


def _text(rows: list[dict[str, Any]]) -> str:
    """Without the brackets of the list."""
    return json.dumps(rows, ensure_ascii=True)[1:-1]
