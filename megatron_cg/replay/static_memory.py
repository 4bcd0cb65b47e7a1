"""Where a static tensor of a graph lies, and whether a value is there already."""

from __future__ import annotations

from collections.abc import Sequence
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
