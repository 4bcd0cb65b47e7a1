"""The allocator of a graph pool, against what torch's does with the same requests."""

from __future__ import annotations

import random

import pytest

from megatron_cg.tools.plan.pool import MIB, Block, Pool


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
    ],
)
def test_segments_have_the_sizes_of_torchs(size: int, allocated: int, reserved: int) -> None:
    pool = Pool()
    pool.allocate(size)
    # A rest of up to 1 MiB of a large block is not split off, so it counts as allocated.
    assert (pool.allocated, pool.reserved) == (allocated, reserved)


def test_nothing_takes_nothing() -> None:
    pool = Pool()
    pool.free(pool.allocate(0))
    assert (pool.allocated, pool.reserved, pool.peak) == (0, 0, 0)


def test_freed_memory_is_used_again_and_stays_reserved() -> None:
    pool = Pool()
    for _ in range(3):
        blocks = [pool.allocate(16 * MIB) for _ in range(4)]
        for block in blocks:
            pool.free(block)
    assert (pool.allocated, pool.peak, pool.reserved) == (0, 64 * MIB, 64 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    pool = Pool()
    large, small = pool.allocate(64 * MIB), pool.allocate(32 * MIB)
    pool.free(large)
    pool.free(small)
    pool.allocate(32 * MIB)
    pool.allocate(64 * MIB)
    assert pool.reserved == 96 * MIB


def test_neighbours_become_one_again() -> None:
    pool = Pool()
    parts = [pool.allocate(4 * MIB) for _ in range(5)]
    assert pool.reserved == 20 * MIB
    for part in (parts[0], parts[2], parts[4], parts[1], parts[3]):
        pool.free(part)
    pool.allocate(20 * MIB)
    assert pool.reserved == 20 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    pool = Pool()
    pool.free(pool.allocate(20 * MIB))
    pool.allocate(1024)
    assert pool.reserved == 22 * MIB


def test_a_phase_has_a_peak_of_its_own() -> None:
    pool = Pool()
    pool.free(pool.allocate(64 * MIB))
    assert pool.mark() == 0
    pool.allocate(16 * MIB)
    assert (pool.recent_peak, pool.peak) == (16 * MIB, 64 * MIB)


def test_no_byte_is_lost() -> None:
    chosen = random.Random(1)
    pool = Pool()
    live: list[Block | None] = []
    for _ in range(5000):
        if live and chosen.random() < 0.5:
            pool.free(live.pop(chosen.randrange(len(live))))
        else:
            live.append(pool.allocate(chosen.choice((100, 5000, MIB, 3 * MIB, 12 * MIB))))
        assert pool.allocated == sum(block.size for block in live if block is not None)
    for block in live:
        pool.free(block)
    assert sum(size for blocks in pool._free.values() for size, _, _ in blocks) == pool.reserved
