"""A file that shows whether it was decoded."""

from __future__ import annotations

import pickle
from pathlib import Path

MARKER = "decoded"


class _Poison:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _write, (str(self._marker),)


def _write(path: str) -> None:
    Path(path).touch()


def poisoned(marker: Path) -> bytes:
    """A pickle that makes the file ``marker`` when it is decoded."""
    return pickle.dumps(_Poison(marker))
