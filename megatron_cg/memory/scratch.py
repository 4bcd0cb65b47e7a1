"""Scratch memory: graph memory that is idle between two steps, for tensors that live only then.

A graph's pool holds the activations that its forward pass saves for its backward pass. They stay
reserved permanently, since every replay writes to the same addresses. But they are unused from the
last backward pass of a step to the first forward pass of the next step. The optimizer's copies of
the gradients live exactly in that interval. A block that was freed while its graph was captured
counts as reserved and not as allocated, although every replay writes to it.

Relied on: torch 2.11, ``torch.cuda.memory_snapshot()``.

Note [What is borrowed]
    Only blocks that were freed while the graphs were captured are borrowed. The allocator itself
    allocates them, as it would for another graph of the pool. They belong to the capture stream, so
    they are allocated on that stream. The borrower uses them on the stream that replays the graphs,
    which orders this use after the graphs of one step and before those of the next.
    No kernel may run on the capture stream, though. With deterministic algorithms ``torch.empty``
    fills the memory that it returns (``torch.utils.deterministic.fill_uninitialized_memory``), and
    the fill would race with writes on the other stream. So bare storages are allocated instead.
    The pool must not grow, since activations could not use the growth. So the first time, a block
    is searched for each piece in the allocator's list of free blocks, by the allocator's own rule
    (the smallest block that fits; its rest is a block again if it has more than a MiB). Only pieces
    with a block are allocated in the pool. If the pool grows anyway, nothing more is borrowed.

Note [Side by side]
    Consecutive pieces from the same block would lie side by side there, so they are allocated as
    one chunk. The block is the smallest that fits the first piece and is large enough for all of
    them, so it is also the smallest that fits the chunk. The bytes are at the same addresses either
    way, and chunks never grow so large that small blocks stay unused. Each piece begins at a
    multiple of 512 bytes, as every allocation does: with another alignment, kernels may sum in
    another order.
    A chunk is freed when its last piece is freed. A caller that asks again while somebody still
    holds one of its pieces gets ordinary memory that time: the pool has no second place for the
    chunk. Ordinary memory is allocated piece by piece: large requests fit nowhere (docs/memory.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_cg.memory.storage import StorageReference
from megatron_cg.upstream.symbols import Symbol

_BEGIN, _END, _RELEASE = (
    Symbol(f"torch._C:{name}", "what turns allocations to a pool")
    for name in (
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
    )
)
RELIES_ON = (_BEGIN, _END, _RELEASE)
SMALL = 1 << 20
"""Bytes up to which the allocator takes blocks of another kind, which are not worth borrowing."""
_ROUND = 512
_DENSE = torch.contiguous_format


@dataclass
class _Part:
    """Adjacent pieces that differ only in the first dimension; offsets in elements of the chunk."""

    start: int
    stop: int
    tail: torch.Size
    rows: list[int]


class _Chunk:
    """One allocation: which of the caller's pieces it holds, and how it is cut."""

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
        """Has the chunk's shape and memory of one element, for ``empty_like``, the fastest call."""

    def cut(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a tensor that was made like the template into the pieces."""
        if len(self.places) == 1:
            return (memory,)
        pieces: list[torch.Tensor] = []
        for part in self.parts:
            rows = memory[part.start : part.stop].view(-1, *part.tail)
            # To autograd they are independent tensors, like pieces that are allocated alone.
            pieces += rows.unsafe_split_with_sizes(part.rows)
        return pieces


@dataclass
class _Plan:
    """What a caller gets from the pool, and what from ordinary memory."""

    borrowed: list[_Chunk] = field(default_factory=list)
    ordinary: list[_Chunk] = field(default_factory=list)


class IdlePool:
    """Scratch memory of one graph pool; see Note [What is borrowed]."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool, self._index = pool, torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        free: dict[int, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == pool:
                unused = segment["total_size"] - segment["allocated_size"]
                free[segment["stream"]] = free.get(segment["stream"], 0) + unused
        stream = max(free, key=free.__getitem__, default=None)
        self._stream = torch.cuda.ExternalStream(stream) if stream is not None else None
        self._plans: dict[Hashable, _Plan] = {}
        self._given: dict[Hashable, list[StorageReference]] = {}
        self._grew = False
        self.borrowed_bytes = 0
        """Bytes that the plans made so far borrow."""

    def borrows(self) -> bool:
        """Whether some of the tensors are in memory that the next replay writes."""
        return self.borrowed_bytes > 0

    def still_held(self) -> int:
        """How many borrowed allocations somebody still holds; each is reported only once."""
        given, self._given = self._given, {}
        return sum(not chunk.expired() for chunks in given.values() for chunk in chunks)

    def stop_borrowing(self) -> None:
        """Return ordinary memory from now on."""
        self._plans.clear()
        self._grew, self.borrowed_bytes = True, 0

    def empty(
        self, caller: Hashable, like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """A contiguous, uninitialised tensor with the shape of each of ``like``.

        A caller asks for the same shapes each time, and callers ask in the same order.
        """
        if caller not in self._plans:
            self._plans[caller] = self._planned(like, dtype)
        plan = self._plans[caller]
        held = [chunk for chunk in self._given.get(caller, ()) if not chunk.expired()]
        if held:
            # See Note [Side by side].
            plan = self._plan([], like, dtype)
        inside: list[torch.Tensor] = []
        if plan.borrowed:
            with self._allocating():
                inside = self._new_all(plan.borrowed)
        self._given[caller] = held + [StorageReference(t.untyped_storage()) for t in inside]
        tensors: list[torch.Tensor] = [*like]
        for chunk, memory in zip(plan.borrowed, inside, strict=True):
            for place, piece in zip(chunk.places, chunk.cut(memory), strict=True):
                tensors[place] = piece
        for chunk, memory in zip(plan.ordinary, self._new_all(plan.ordinary), strict=True):
            tensors[chunk.places[0]] = memory
        return tensors

    def _planned(self, like: Sequence[torch.Tensor], dtype: torch.dtype) -> _Plan:
        """Allocate each piece that has a block, to see what the pool gives without growing."""
        sizes = [tensor.numel() * dtype.itemsize for tensor in like]
        base = torch.empty((), dtype=dtype, device=self._device)
        places: list[list[int]] = []
        tried: list[torch.Tensor] = []
        for run in side_by_side(self._free_blocks(), sizes):
            memory = self._borrow(_Chunk(run, like, base)) if not self._grew else None
            if memory is None:
                break
            tried.append(memory)
            places.append(run)
            self.borrowed_bytes += sum(sizes[place] for place in run)
        return self._plan(places, like, dtype)

    def _plan(
        self, borrowed: Sequence[Sequence[int]], like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> _Plan:
        base = torch.empty((), dtype=dtype, device=self._device)
        inside = {place for places in borrowed for place in places}
        ordinary = [place for place in range(len(like)) if place not in inside]
        return _Plan(
            [_Chunk(places, like, base) for places in borrowed],
            [_Chunk([place], like, base) for place in ordinary],
        )

    def _free_blocks(self) -> list[int]:
        """Sizes of the blocks that the pool could give on its stream, in bytes, ascending."""
        stream = self._stream.cuda_stream if self._stream is not None else None
        return sorted(
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._pool and segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > SMALL
        )

    def _borrow(self, chunk: _Chunk) -> torch.Tensor | None:
        """A chunk in the pool; None if the pool grew for it, or could not."""
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
        """Route this thread's allocations to the pool."""
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
    """A contiguous tensor that no kernel has filled; see Note [What is borrowed]."""
    storage = torch.UntypedStorage(like.numel() * like.itemsize, device=like.device)
    empty = torch.tensor([], dtype=like.dtype, device=like.device)
    return empty.set_(storage, 0, (like.numel(),), (1,)).view(like.shape)


def side_by_side(blocks: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """Which pieces to allocate together; see Note [Side by side].

    Args:
        blocks: sizes of free blocks in bytes, ascending; afterwards, what is left of them.
        sizes: sizes of the pieces in bytes.

    Returns:
        Indices into ``sizes``, one list per chunk. A piece without a block is in no list.
    """
    chunks: list[list[int]] = []
    rest = 0
    for place, nbytes in enumerate(sizes):
        block = take(blocks, nbytes)
        if block is None:
            continue
        if chunks and block == rest:
            chunks[-1].append(place)
        else:
            chunks.append([place])
        rest = block - _rounded(nbytes)
    return chunks


def take(blocks: list[int], nbytes: int) -> int | None:
    """Take the free block for a piece out of ``blocks`` and return its size; None if none fits.

    As in torch 2.11's allocator, a piece is rounded up to 512 bytes and takes the smallest block
    that fits; the rest of it is a block again if it has more than a MiB. Pieces of a MiB or less
    come from blocks of another kind and never fit.

    Args:
        blocks: sizes in bytes, ascending.
        nbytes: size of the piece.
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
