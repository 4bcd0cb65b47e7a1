"""The caching allocator's pools, from its snapshot. Pure functions.

Relied on: torch 2.11, ``torch.cuda.memory_snapshot()``: a list of segments with ``address``,
``total_size``, ``allocated_size``, ``stream``, ``segment_pool_id`` and ``blocks``, each block with
``address``, ``size`` and ``state``.

Note [What "allocated" counts of a graph]
    A block that was freed while its graph was captured stays in the graph's pool. It counts as
    reserved and not as allocated, although every replay writes to it. So after capture, allocated
    memory does not include the activations that a graph saves for its backward pass; reserved
    memory does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Segments = Sequence[Mapping[str, Any]]

_FREE = "inactive"
DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class PoolUse:
    """Memory of one pool on one stream, in bytes. The allocator never moves blocks between them."""

    pool: tuple[int, int]
    stream: int
    segments: int
    reserved: int
    allocated: int
    largest_free: int

    @property
    def is_graphs(self) -> bool:
        """Whether this is a private pool, as graphs have."""
        return self.pool != DEFAULT_POOL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def text(self) -> str:
        """One line."""
        name = f"private pool {self.pool}" if self.is_graphs else "default pool"
        sizes = [self.reserved, self.allocated, self.largest_free]
        reserved, allocated, free = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        return (
            f"{name}, stream {self.stream:#x}: {reserved} reserved in {self.segments} segments, "
            f"{allocated} allocated, largest free block {free}"
        )


def pools(segments: Segments) -> list[PoolUse]:
    """Memory by pool and stream, largest first."""
    found: dict[tuple[tuple[int, int], int], list[Mapping[str, Any]]] = {}
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", DEFAULT_POOL))
        found.setdefault(((pool[0], pool[1]), segment["stream"]), []).append(segment)
    made = [_use(pool, stream, group) for (pool, stream), group in found.items()]
    return sorted(made, key=lambda use: -use.reserved)


def held_addresses(segments: Segments) -> Callable[[int], bool]:
    """Return a function that says whether an address, in any pool, is in a block in use."""
    blocks = sorted(
        (block["address"], block["address"] + block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != _FREE
    )
    starts = [start for start, _ in blocks]

    def is_held(address: int) -> bool:
        position = bisect_right(starts, address) - 1
        return position >= 0 and address < blocks[position][1]

    return is_held


def _use(pool: tuple[int, int], stream: int, segments: Segments) -> PoolUse:
    free = [
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == _FREE
    ]
    return PoolUse(
        pool,
        stream,
        len(segments),
        sum(segment["total_size"] for segment in segments),
        sum(segment["allocated_size"] for segment in segments),
        max(free, default=0),
    )
