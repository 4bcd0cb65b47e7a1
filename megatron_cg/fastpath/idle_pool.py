"""Idle memory of a graph pool, for what lives only between two steps.

A graph's pool holds the activations that its forward pass saves for its backward pass. They stay
reserved permanently, since every replay writes to the same addresses. But they are unused from the
last backward pass of a step to the first forward pass of the next step. The optimizer's copies of
the gradients live exactly in that interval. A block that was freed while its graph was captured
counts as reserved and not as allocated, although every replay writes to it.

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

Note [What is still held]
    If somebody still holds a piece when its caller asks again, the pool has no second place for it.
    The caller then gets ordinary memory, that time.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_cg.backends.driver import StorageReference
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
        self._borrowed: dict[Hashable, list[int]] = {}
        """For each caller, which of its pieces the pool has a place for."""
        self._given: dict[Hashable, list[StorageReference]] = {}
        self._grew = False
        self.borrowed_bytes = 0
        """Bytes that the callers so far borrow, which the next replay writes."""

    def still_held(self) -> int:
        """How many borrowed tensors somebody still holds; each is reported only once."""
        given, self._given = self._given, {}
        return sum(not piece.expired() for pieces in given.values() for piece in pieces)

    def stop_borrowing(self) -> None:
        self._borrowed.clear()
        self._grew, self.borrowed_bytes = True, 0

    def empty(
        self, caller: Hashable, like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """A contiguous, uninitialised tensor with the shape of each of ``like``.

        A caller asks for the same shapes each time, and callers ask in the same order.
        """
        shapes = [tensor.shape for tensor in like]
        if caller not in self._borrowed:
            self._borrowed[caller] = self._places(shapes, dtype)
        held = [piece for piece in self._given.get(caller, ()) if not piece.expired()]
        # See Note [What is still held].
        places = self._borrowed[caller] if not held else []
        inside: dict[int, torch.Tensor] = {}
        if places:
            with self._allocating():
                inside = {place: self._new(shapes[place], dtype) for place in places}
        self._given[caller] = held + [
            StorageReference(t.untyped_storage()) for t in inside.values()
        ]
        return [
            inside[place] if place in inside else self._new(shape, dtype)
            for place, shape in enumerate(shapes)
        ]

    def _places(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[int]:
        """Allocate each piece that has a block, to see what the pool gives without growing."""
        blocks = [] if self._grew else self._free_blocks()
        before = torch.cuda.memory_reserved(self._index)
        places: list[int] = []
        tried: list[torch.Tensor] = []
        for place, shape in enumerate(shapes):
            nbytes = shape.numel() * dtype.itemsize
            if take(blocks, nbytes) is None:
                continue
            try:
                with self._allocating():
                    tried.append(self._new(shape, dtype))
            except torch.OutOfMemoryError:
                self._grew = True
            self._grew = self._grew or torch.cuda.memory_reserved(self._index) != before
            if self._grew:
                break
            places.append(place)
            self.borrowed_bytes += nbytes
        return places

    def _free_blocks(self) -> list[int]:
        stream = self._stream.cuda_stream if self._stream is not None else None
        return sorted(
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._pool and segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > SMALL
        )

    def _new(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that no kernel has filled; see Note [What is borrowed]."""
        if not torch.are_deterministic_algorithms_enabled():
            return torch.empty(shape, dtype=dtype, device=self._device)
        storage = torch.UntypedStorage(shape.numel() * dtype.itemsize, device=self._device)
        empty = torch.tensor([], dtype=dtype, device=self._device)
        return empty.set_(storage, 0, (shape.numel(),), (1,)).view(shape)

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        assert self._stream is not None
        begin, end, release = _BEGIN.find(), _END.find(), _RELEASE.find()
        with torch.cuda.stream(self._stream):
            begin(self._index, self._pool)
            try:
                yield
            finally:
                end(self._index, self._pool)
                release(self._index, self._pool)


def take(blocks: list[int], nbytes: int) -> int | None:
    """Take the free block for a piece out of ``blocks`` and return its size; None if none fits.

    As in torch 2.11's allocator, a piece is rounded up to 512 bytes and takes the smallest block
    that fits; the rest of it is a block again if it has more than a MiB. Pieces of a MiB or less
    come from blocks of another kind and never fit.
    ``blocks`` are sizes in bytes, ascending.
    """
    wanted = -(-nbytes // _ROUND) * _ROUND
    place = bisect_left(blocks, wanted)
    if wanted <= SMALL or place == len(blocks):
        return None
    block = blocks.pop(place)
    if block - wanted > SMALL:
        insort(blocks, block - wanted)
    return block
