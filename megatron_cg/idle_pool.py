"""Memory of graphs that lies idle between two steps, lent to what lives only then.

A graph's pool holds the activations that its forward pass leaves to its backward pass: reserved
for good, since every replay writes to the same addresses, and of no use from the last backward pass
of a step to the first forward pass of the next (see ``memory_pools.py``). The optimizer's copies of
the gradients live in just that time.

Note [What is lent]
    Blocks that were freed while the graphs were captured, and no others: the allocator itself gives
    them out, as it would to another graph of the pool. They belong to the stream of the capture,
    so they are asked for on that stream; whoever borrows uses them on the stream that the graphs
    are replayed on, which orders them after one step's graphs and before the next one's.
    Nothing may run on that stream, though: with deterministic algorithms ``torch.empty`` fills what
    it gives (``torch.utils.deterministic.fill_uninitialized_memory``), and the fill would race with
    what the other stream writes. So bare storages are asked for.
    The pool must not grow for it: what it grew by would be lost to activations. So the first time
    each piece is looked for in the allocator's own list of free blocks, the way it would look
    itself (the smallest block that will do, and what is left of it if that is more than a MiB), and
    only a piece that has a block is asked for. Where the pool grew all the same, no more is lent.

Relied on: torch 2.11, ``torch.cuda.memory_snapshot()`` (see ``memory_pools.py``),
``torch.cuda.memory_reserved``, ``torch.multiprocessing.reductions.StorageWeakRef`` and
``torch._C``'s ``_cuda_beginAllocateCurrentThreadToPool``, ``_cuda_endAllocateToPool`` and
``_cuda_releasePool``, as ``torch.cuda.use_mem_pool`` calls them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cg.memory_pools import pools
from megatron_cg.versions import Symbol

_BEGIN, _END, _RELEASE = (
    Symbol("torch", f"torch._C:{name}", "what turns allocations to a pool")
    for name in (
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    )
)
RELIES_ON = (_BEGIN, _END, _RELEASE)
SMALL = 1 << 20
"""Bytes up to which the allocator takes blocks of another kind; not worth lending."""
_ROUND = 512


class Room(Protocol):
    """Where tensors that live between two steps come from."""

    def empty(
        self, caller: Hashable, sizes: Sequence[int], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """A flat tensor, not initialised, of each number of elements.

        A caller asks for the same sizes each time, and all callers in the same order.
        """

    def lends(self) -> bool:
        """Whether some of them lie where the next replay writes."""

    def still_held(self) -> int:
        """How many of those that lie there are still held by anybody; asked once for each."""

    def lend_no_more(self) -> None:
        """Give ordinary memory from now on."""


class IdlePool:
    """The idle memory of one pool; see Note [What is lent].

    Args:
        pool: of the graphs.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool, self._device = pool, torch.cuda.current_device()
        uses = [use for use in pools(torch.cuda.memory_snapshot()) if use.pool == pool]
        free = max(uses, key=lambda use: use.reserved - use.allocated, default=None)
        self._stream = torch.cuda.ExternalStream(free.stream) if free is not None else None
        self._from_pool: dict[Hashable, list[bool]] = {}
        self._given: list[StorageWeakRef] = []
        self._grew = False
        self.lent_bytes = 0
        """By the plans made so far."""

    def lends(self) -> bool:
        """See :class:`Room`."""
        return self.lent_bytes > 0

    def still_held(self) -> int:
        """See :class:`Room`."""
        given, self._given = self._given, []
        return sum(not storage.expired() for storage in given)

    def lend_no_more(self) -> None:
        """See :class:`Room`."""
        self._from_pool = {caller: [False] * len(lent) for caller, lent in self._from_pool.items()}
        self._grew, self.lent_bytes = True, 0

    def empty(
        self, caller: Hashable, sizes: Sequence[int], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """See :class:`Room`."""
        if caller not in self._from_pool:
            tensors, self._from_pool[caller] = self._try(sizes, dtype)
            return tensors
        lent = self._from_pool[caller]
        inside: list[torch.Tensor] = []
        if any(lent):
            with self._allocating():
                inside = [self._new(n, dtype) for n, yes in zip(sizes, lent, strict=True) if yes]
        self._note(inside)
        given = iter(inside)
        return [
            next(given) if yes else self._new(size, dtype)
            for size, yes in zip(sizes, lent, strict=True)
        ]

    def _try(
        self, sizes: Sequence[int], dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Ask for each piece that has a block; which of them the pool gave."""
        blocks = self._free_blocks()
        tensors: list[torch.Tensor] = []
        lent: list[bool] = []
        for size in sizes:
            nbytes = size * dtype.itemsize
            tensor = self._lent(size, dtype) if not self._grew and fits(blocks, nbytes) else None
            lent.append(tensor is not None)
            if tensor is None:
                tensor = self._new(size, dtype)
            else:
                self._note([tensor])
                self.lent_bytes += nbytes
            tensors.append(tensor)
        return tensors, lent

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        self._given += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def _free_blocks(self) -> list[int]:
        """Sizes of what the pool could give on its stream, in bytes and in order."""
        stream = self._stream.cuda_stream if self._stream is not None else None
        return sorted(
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._pool and segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > SMALL
        )

    def _lent(self, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in the pool, or None where the pool has grown for it."""
        before = torch.cuda.memory_reserved(self._device)
        try:
            with self._allocating():
                tensor = self._new(size, dtype)
        except torch.OutOfMemoryError:
            self._grew = True
            return None
        self._grew = torch.cuda.memory_reserved(self._device) != before
        return None if self._grew else tensor

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        device = torch.device("cuda", self._device)
        if not torch.are_deterministic_algorithms_enabled():
            return torch.empty(size, dtype=dtype, device=device)
        storage = torch.UntypedStorage(size * dtype.itemsize, device=device)
        empty = torch.tensor([], dtype=dtype, device=device)
        return empty.set_(storage, 0, (size,), (1,))

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Let this thread's allocations come from the pool."""
        assert self._stream is not None
        begin, end, release = _BEGIN.find(), _END.find(), _RELEASE.find()
        with torch.cuda.stream(self._stream):
            begin(self._device, self._pool)
            try:
                yield
            finally:
                end(self._device, self._pool)
                release(self._device, self._pool)


def fits(blocks: list[int], nbytes: int) -> bool:
    """Whether a piece finds room among free blocks; ``blocks`` is then what is left of them.

    As torch 2.11's allocator does: a piece is rounded up to 512 bytes, the smallest block that is
    large enough is taken, and its rest is a block again if it has more than a MiB. Pieces of a MiB
    or less come from blocks of another kind and never fit.

    Args:
        blocks: sizes in bytes, in order.
        nbytes: of the piece.
    """
    wanted = -(-nbytes // _ROUND) * _ROUND
    place = bisect_left(blocks, wanted)
    if wanted <= SMALL or place == len(blocks):
        return False
    rest = blocks.pop(place) - wanted
    if rest > SMALL:
        insort(blocks, rest)
    return True
