"""The autograd function that replays one graph, and the memory that it reads gradients from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The memory of one static tensor. A value that already lies in it is not copied."""

    address: int
    stride: tuple[int, ...]
    nbytes: int
    lazy: tuple[bool, bool] = (False, False)
    """Whether torch reads the memory as conjugated, or as negated."""

    @classmethod
    def of(cls, static: torch.Tensor) -> StaticMemory:
        """The memory of ``static``."""
        return cls(static.data_ptr(), static.stride(), static.nbytes, _lazy(static))

    def holds(self, value: Any) -> bool:
        """Whether ``value``, a tensor of the same shape, lies in this memory."""
        return bool(
            value.data_ptr() == self.address
            and value.stride() == self.stride
            and _lazy(value) == self.lazy
        )


def _lazy(tensor: Any) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


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
    incoming: tuple[StaticMemory | None, ...]
    """Where a backward replay reads the gradient of each output; None for one without a gradient.
    A gradient that lies elsewhere is copied there first."""

    @property
    def has_several_gradients(self) -> bool:
        """Whether more than one output needs a gradient."""
        return len(self.incoming) - self.incoming.count(None) > 1


def copies(memories: Sequence[StaticMemory | None], values: Sequence[Any]) -> tuple[int, int]:
    """How many of ``values`` are copied into their static memory, and the bytes of these.

    None is the gradient of an output that nothing uses: zeros are written, which counts as a copy.
    """
    number = nbytes = 0
    for memory, value in zip(memories, values, strict=True):
        if memory is not None and (value is None or not memory.holds(value)):
            number += 1
            nbytes += memory.nbytes
    return number, nbytes
