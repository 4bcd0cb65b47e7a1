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
    only what has a block is asked for. Where the pool grew all the same, no more is lent.

Note [Side by side]
    Pieces that follow each other into one block would lie side by side there, and are asked for at
    once. The block is the smallest one for the first of them and large enough for all, so it is
    the smallest one for all: the same bytes lie at the same places, whichever way they are asked
    for, and no larger chunk leaves small blocks unused. Each piece begins at a multiple of 512
    bytes, as every allocation does: kernels that see another alignment may sum in another order.
    A chunk is free again when its last piece is. So a caller that asks anew while somebody has
    one of its pieces gets ordinary memory for once: the pool has no second place for the chunk.
    Ordinary memory is asked for piece by piece: large requests fit nowhere (docs/memory.md).

Relied on: torch 2.11, ``torch.cuda.memory_snapshot()`` (see ``memory_pools.py``),
``torch.cuda.memory_reserved`` and ``torch._C``'s ``_cuda_beginAllocateCurrentThreadToPool``,
``_cuda_endAllocateToPool`` and ``_cuda_releasePool``, as ``torch.cuda.use_mem_pool`` calls them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_cg.memory.pools import pools
from megatron_cg.memory.storage_reference import StorageReference
from megatron_cg.upstream.symbols import Symbol

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
_DENSE = torch.contiguous_format


class ScratchMemory(Protocol):
    """Where tensors that live between two steps come from."""

    def empty(
        self, caller: Hashable, like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """A tensor of the shape of each of ``like``, contiguous and not initialised.

        A caller asks for the same shapes each time, and all callers in the same order.
        """

    def lends(self) -> bool:
        """Whether some of them lie where the next replay writes."""

    def still_held(self) -> int:
        """How many allocations that lie there are still held by anybody; asked once for each."""

    def lend_no_more(self) -> None:
        """Give ordinary memory from now on."""


@dataclass
class _Part:
    """Pieces without gaps that differ in their first dimension at most; elements of their chunk."""

    start: int
    stop: int
    tail: torch.Size
    rows: list[int]


class _Chunk:
    """One allocation: which of the caller's pieces lie in it, and how it is cut."""

    def __init__(self, places: Sequence[int], like: Sequence[torch.Tensor], base: torch.Tensor):
        self.places = places
        self.parts: list[_Part] = []
        unit, start = _ROUND // base.itemsize, 0
        for shape in (like[place].shape for place in places):
            stop = start + shape.numel()
            last = self.parts[-1] if self.parts else None
            if last is not None and last.stop == start and last.tail == shape[1:]:
                last.stop = stop
                last.rows.append(shape[0])
            else:
                self.parts.append(_Part(start, stop, shape[1:], list(shape[:1])))
            start = -(-stop // unit) * unit
        shape = like[places[0]].shape if len(places) == 1 else torch.Size([start])
        self.template = base.expand(shape)
        """Of the chunk's shape, with memory of one element: ``empty_like`` is the fastest call."""

    def cut(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces of a tensor that was made like the template."""
        if len(self.places) == 1:
            return (memory,)
        found: list[torch.Tensor] = []
        for part in self.parts:
            rows = memory[part.start : part.stop].view(-1, *part.tail)
            # To autograd they are tensors of their own, as single ones would be.
            found += rows.unsafe_split_with_sizes(part.rows)
        return found


@dataclass
class _Plan:
    """What a caller gets of the pool, and of ordinary memory."""

    lent: list[_Chunk] = field(default_factory=list)
    ordinary: list[_Chunk] = field(default_factory=list)


class IdlePool:
    """The idle memory of one pool; see Note [What is lent].

    Args:
        pool: of the graphs.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool, self._index = pool, torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        uses = [use for use in pools(torch.cuda.memory_snapshot()) if use.pool == pool]
        free = max(uses, key=lambda use: use.reserved - use.allocated, default=None)
        self._stream = torch.cuda.ExternalStream(free.stream) if free is not None else None
        self._plans: dict[Hashable, _Plan] = {}
        self._given: dict[Hashable, list[StorageReference]] = {}
        self._grew = False
        self.lent_bytes = 0
        """By the plans made so far."""

    def lends(self) -> bool:
        """See :class:`ScratchMemory`."""
        return self.lent_bytes > 0

    def still_held(self) -> int:
        """See :class:`ScratchMemory`."""
        given, self._given = self._given, {}
        return sum(not chunk.expired() for chunks in given.values() for chunk in chunks)

    def lend_no_more(self) -> None:
        """See :class:`ScratchMemory`."""
        self._plans.clear()
        self._grew, self.lent_bytes = True, 0

    def empty(
        self, caller: Hashable, like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """See :class:`ScratchMemory`."""
        if caller not in self._plans:
            self._plans[caller] = self._planned(like, dtype)
        plan = self._plans[caller]
        held = [chunk for chunk in self._given.get(caller, ()) if not chunk.expired()]
        if held:
            # See Note [Side by side].
            plan = self._plan([], like, dtype)
        inside: list[torch.Tensor] = []
        if plan.lent:
            with self._allocating():
                inside = self._new_all(plan.lent)
        self._given[caller] = held + [StorageReference(t.untyped_storage()) for t in inside]
        found: list[torch.Tensor] = [*like]
        for chunk, memory in zip(plan.lent, inside, strict=True):
            for place, piece in zip(chunk.places, chunk.cut(memory), strict=True):
                found[place] = piece
        for chunk, memory in zip(plan.ordinary, self._new_all(plan.ordinary), strict=True):
            found[chunk.places[0]] = memory
        return found

    def _planned(self, like: Sequence[torch.Tensor], dtype: torch.dtype) -> _Plan:
        """Ask for all that has a block, and see what the pool gives without growing."""
        sizes = [tensor.numel() * dtype.itemsize for tensor in like]
        base = torch.empty((), dtype=dtype, device=self._device)
        places: list[list[int]] = []
        tried: list[torch.Tensor] = []
        for run in side_by_side(self._free_blocks(), sizes):
            memory = self._lent(_Chunk(run, like, base)) if not self._grew else None
            if memory is None:
                break
            tried.append(memory)
            places.append(run)
            self.lent_bytes += sum(sizes[place] for place in run)
        return self._plan(places, like, dtype)

    def _plan(
        self, lent: Sequence[Sequence[int]], like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> _Plan:
        base = torch.empty((), dtype=dtype, device=self._device)
        inside = {place for places in lent for place in places}
        ordinary = [place for place in range(len(like)) if place not in inside]
        return _Plan(
            [_Chunk(places, like, base) for places in lent],
            [_Chunk([place], like, base) for place in ordinary],
        )

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

    def _lent(self, chunk: _Chunk) -> torch.Tensor | None:
        """A chunk in the pool, or None where the pool has grown for it."""
        before = torch.cuda.memory_reserved(self._index)
        try:
            with self._allocating():
                (memory,) = self._new_all([chunk])
        except torch.OutOfMemoryError:
            self._grew = True
            return None
        self._grew = torch.cuda.memory_reserved(self._index) != before
        return None if self._grew else memory

    def _new_all(self, chunks: Sequence[_Chunk]) -> list[torch.Tensor]:
        if not torch.are_deterministic_algorithms_enabled():
            return [torch.empty_like(chunk.template, memory_format=_DENSE) for chunk in chunks]
        return [_bare(chunk.template) for chunk in chunks]

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Let this thread's allocations come from the pool."""
        assert self._stream is not None
        begin, end, release = _BEGIN.find(), _END.find(), _RELEASE.find()
        with torch.cuda.stream(self._stream):
            begin(self._index, self._pool)
            try:
                yield
            finally:
                end(self._index, self._pool)
                release(self._index, self._pool)


def _bare(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that nothing has filled; see Note [What is lent]."""
    storage = torch.UntypedStorage(like.numel() * like.itemsize, device=like.device)
    empty = torch.tensor([], dtype=like.dtype, device=like.device)
    return empty.set_(storage, 0, (like.numel(),), (1,)).view(like.shape)


def side_by_side(blocks: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """Which pieces to ask for at once; see Note [Side by side].

    Args:
        blocks: sizes of free blocks in bytes, in order; what is left of them afterwards.
        sizes: of the pieces, in bytes.

    Returns:
        Places in ``sizes``, those of one chunk together. A piece without a block is in none.
    """
    found: list[list[int]] = []
    rest = 0
    for place, nbytes in enumerate(sizes):
        block = take(blocks, nbytes)
        if block is None:
            continue
        if found and block == rest:
            found[-1].append(place)
        else:
            found.append([place])
        rest = block - _rounded(nbytes)
    return found


def take(blocks: list[int], nbytes: int) -> int | None:
    """The free block that a piece is put into, if any; ``blocks`` is then what is left of them.

    As torch 2.11's allocator does: a piece is rounded up to 512 bytes, the smallest block that is
    large enough is taken, and its rest is a block again if it has more than a MiB. Pieces of a MiB
    or less come from blocks of another kind and never fit.

    Args:
        blocks: sizes in bytes, in order.
        nbytes: of the piece.
    """
    wanted = _rounded(nbytes)
    place = bisect_left(blocks, wanted)
    if wanted <= SMALL or place == len(blocks):
        return None
    block = blocks.pop(place)
    if block - wanted > SMALL:
        insort(blocks, block - wanted)
    return block


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUND) * _ROUND
