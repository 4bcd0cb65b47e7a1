"""Buffers in which unsharded parameters keep their addresses while there are graphs.

FSDP2 and Megatron-FSDP v2 gather a unit into memory that they free when they reshard it. A graph
needs the same addresses in each step. So units with equal parameters share buffers that are never
freed. How many they need is up to the sharding.

Note [A buffer in use]
    If a group is gathered while another one still holds their buffer, one of the two lies in memory
    of its own, until its next gather finds the buffer free. Which one is up to the sharding, and it
    is an error if neither may move. The guard of a unit's graphs sees that its parameters moved.
    All ranks see the same.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Self

import torch

from megatron_cg.upstream.patch import Undo

Storages = Sequence[Sequence[torch.UntypedStorage]]


class Buffer:
    """Memory for the unsharded parameters of one group at a time."""

    def __init__(self, storages: Storages) -> None:
        self.storages, self.places = storages, 0
        self.holder: Place | None = None
        """The place whose parameters are there."""


class Place:
    """Where the unsharded parameters of one group lie: in a buffer, or aside.

    Groups with equal keys share one of the ``buffers``. Each sharding has a subclass, and its
    functions are replaced by ones that call :meth:`enter` and :meth:`leave`.
    """

    has_values: Any = False
    """Whether the parameters have values that a move must keep."""

    def __init__(self, group: Any, buffers: dict[Any, Buffer], key: Hashable) -> None:
        self.group = group
        if key not in buffers:
            buffers[key] = Buffer(self.allocate())
        self.buffer = buffers[key]
        self.aside = self.has_values
        """Whether they are in memory of their own, if they are anywhere."""

    def allocate(self) -> Storages:
        """New memory for the group's unsharded parameters."""
        raise NotImplementedError

    def move(self, storages: Storages) -> None:
        """Make the same parameters lie in other memory, with their values if they have some."""
        raise NotImplementedError

    def released(self) -> None:
        """Give the parameters memory of their own again, which is freed if it is not in use."""
        raise NotImplementedError

    def functions_replaced(self) -> Iterator[Undo]:
        raise NotImplementedError

    def to_move(self, holder: Self) -> "Place":
        """This place or ``holder``, which has the buffer. Raises BufferInUseError for neither."""
        raise NotImplementedError

    def taken(self) -> Iterator[Undo]:
        """Use the buffer from now on."""
        self.buffer.places += 1
        if not self.aside:
            self.move(self.buffer.storages)
        yield self.released
        yield from self.functions_replaced()

    def enter(self) -> None:
        """Lie in the buffer, or aside; see Note [A buffer in use]. Raises BufferInUseError."""
        holder: Any = self.buffer.holder
        if holder not in (None, self):
            other = self.to_move(holder)
            if not other.aside:
                other.step_aside()
            if other is self:
                return
        self.buffer.holder = self
        if self.aside:
            self.move(self.buffer.storages)
            self.aside = False

    def leave(self) -> None:
        if self.buffer.holder is self:
            self.buffer.holder = None

    def step_aside(self) -> None:
        self.move(self.allocate())
        self.aside = True


def lies_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor like this one, in other memory from its start."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.size(), tensor.stride())
