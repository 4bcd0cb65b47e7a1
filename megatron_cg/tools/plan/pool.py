"""Simulates torch's caching allocator for one CUDA graph pool, block by block. Pure.

Follows torch 2.11, ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are multiples of 512 bytes. Sizes
up to 1 MiB come from segments of 2 MiB, and sizes below 10 MiB from segments of 20 MiB. A larger
size gets its own segment, rounded up to 2 MiB. The allocator takes the smallest free block that is
large enough (``get_free_block``) and splits it if the rest is worth it (``should_split``). A graph
pool returns nothing while its graphs live, so its reserved memory only grows. Not simulated:
``expandable_segments``, ``max_split_size_mb``, ``roundup_power2_divisions``.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MIB = 1 << 20
_ROUND = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB
_MIDDLE_SEGMENT = 20 * MIB


def round_up(size: int) -> int:
    """The size of a block for ``size`` bytes."""
    return -(-size // _ROUND) * _ROUND


@dataclass(eq=False)
class Block:
    """A part of a segment; ``before`` and ``after`` are its neighbours in the segment."""

    start: int
    size: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class Pool:
    """The blocks of one pool.

    Attributes:
        reserved: bytes of all segments.
        allocated: bytes of the blocks in use, rounded as the allocator does.
        peak: the maximum of ``allocated``.
        recent_peak: the maximum since :meth:`mark`.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        self.peak = 0
        self.recent_peak = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def mark(self) -> int:
        """Begin a new phase; returns the bytes in use."""
        self.recent_peak = self.allocated
        return self.allocated

    def allocate(self, size: int) -> Block | None:
        """A block of at least ``size`` bytes; None if ``size`` is 0."""
        if size == 0:
            return None
        rounded = round_up(size)
        block = self._taken(rounded) or self._segment(rounded)
        rest = block.size - rounded
        if rest >= _ROUND if block.small else rest > _SMALL:
            tail = Block(block.start + rounded, rest, block.small, True, block, block.after)
            if block.after is not None:
                block.after.before = tail
            block.size, block.after = rounded, tail
            self._offer(tail)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self.recent_peak = max(self.recent_peak, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        """Free a block and merge it with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            self._withdraw(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.free:
            self._withdraw(block.after)
            block = self._joined(block, block.after)
        self._offer(block)

    @staticmethod
    def _joined(left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _taken(self, size: int) -> Block | None:
        """The smallest free block that is large enough, no longer among the free ones."""
        blocks = self._free[size <= _SMALL]
        at = bisect.bisect_left(blocks, (size, 0))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _segment(self, size: int) -> Block:
        length = _SMALL_SEGMENT if size <= _SMALL else _MIDDLE_SEGMENT
        if size >= _MIDDLE:
            length = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        block = Block(self.reserved, length, size <= _SMALL)
        self.reserved += length
        return block

    def _offer(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.start, block))

    def _withdraw(self, block: Block) -> None:
        self._free[block.small].remove((block.size, block.start, block))
