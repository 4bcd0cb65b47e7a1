"""How autograd sees the replays of one graph, and the gradients that lie in the graph's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReplayFunction:
    """The function of autograd's by which one graph is replayed.

    Note [Gradients that are lent]
        A graph's backward replay leaves the gradients of its weights in memory that other graphs
        of the pool use too, so a backend returns copies of them. While they are lent, the function
        returns them as they lie there. They hold until the next replay of any graph, so whoever
        takes them has used them up, on the stream of the backward pass, before that.
    """

    function: Any
    """A class that derives from ``torch.autograd.Function``."""
    first_weight: int
    """How many arguments come before the weights, which are the last ones."""
    replace: Callable[[Any], Callable[[], None]]
    """Lets something else with a method ``apply`` be called in its place; returns the undo."""
    lend: Callable[[], Callable[[], None]]
    """Lends gradients until the returned function is called."""
