"""The autograd function that replays one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReplayFunction:
    """The autograd function that replays one graph.

    Note [Borrowed gradients]
        A graph's backward replay leaves the weight gradients in memory that other graphs of the
        pool also use, so a backend returns copies of them. While gradients are borrowed, the
        function returns them without a copy. They are valid until the next replay of any graph. The
        receiver must finish using them before that, on the stream of the backward pass.
    """

    function: Any
    """A class that derives from ``torch.autograd.Function``."""
    first_weight: int
    """How many arguments come before the weights, which are the last ones."""
    replace: Callable[[Any], Callable[[], None]]
    """Replaces the function by another object with a method ``apply``; returns the undo."""
    borrow: Callable[[], Callable[[], None]]
    """Borrow gradients until the returned function is called."""
    needs: tuple[bool, ...]
    """Which outputs need a gradient."""
