"""Who sees each pass of warmup and capture, in one order.

Note [Around a pass]
    Hooks before a pass, observers in order, the pass, observers in reverse order, hooks after the
    pass. So the last observer is nearest to the pass, and what hooks do is in no observer's view.
    A rank that failed and runs only the hooks that other ranks wait for (``hook_order.py``) has no
    passes, so observers see none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_cg.events import PassBegan, PassEnded, emit


class PassObserver(Protocol):
    """Sees the passes of the units that are captured, by the index of the unit."""

    def pass_begins(self, unit: int, *, forward: bool) -> None:
        """A pass follows at once."""

    def pass_ended(self, unit: int, *, forward: bool) -> None:
        """A pass has ended, and no hook after it has run."""


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
