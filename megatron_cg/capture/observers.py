"""Observers of warmup and capture passes, and the order in which they are called.

Note [Around a pass]
    The order is: hooks before the pass, observers in order, the pass, observers in reverse order,
    hooks after the pass. So the last observer is nearest to the pass, and no observer sees what
    hooks do. A failed rank that runs only the remaining hooks (``hook_order.py``) has no passes, so
    its observers are not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_cg.events import PassBegan, PassEnded, emit


class PassObserver(Protocol):
    """Sees the passes of the units that are captured, by the index of the unit."""

    def pass_begins(self, unit: int, *, forward: bool) -> None:
        """Called right before a pass."""

    def pass_ended(self, unit: int, *, forward: bool) -> None:
        """Called right after a pass, before the hooks that follow it."""


class PassEvents:
    """Emits an event for each pass.

    Args:
        names: of the units.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def pass_begins(self, unit: int, *, forward: bool) -> None:
        """See :class:`PassObserver`."""
        emit(PassBegan(self._names[unit], forward))

    def pass_ended(self, unit: int, *, forward: bool) -> None:
        """See :class:`PassObserver`."""
        emit(PassEnded(self._names[unit], forward))
