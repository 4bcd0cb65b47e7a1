"""Objects compared by identity, without their addresses."""

from __future__ import annotations

from typing import Any


class Same:
    """Equal to another one of the same object; it keeps the object alive.

    A new object may get the ``id`` of one that is gone.
    """

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)

    def __repr__(self) -> str:
        return f"Same({type(self.it).__name__})"
