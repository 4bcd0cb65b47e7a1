"""What is lent of a graphs' pool, on an allocator that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg import idle_pool
from megatron_cg.idle_pool import SMALL, IdlePool

POOL, CAPTURE_STREAM = (0, 7), 0x51
MIB = (1 << 20) // 4
"""Elements of float32."""


class Allocator:
    """Free blocks of a pool, from which pieces are cut, and the memory beside it."""

    def __init__(self, *free: int) -> None:
        self.free, self.reserved, self.inside = sorted(free), 1 << 30, False
        self.calls: list[str] = []
        self.shows: list[int] | None = None
        """What its snapshot shows, if not what is free."""
        self.out_of_memory = False

    def snapshot(self) -> list[dict[str, Any]]:
        def segment(pool: tuple[int, int], stream: int, free: list[int]) -> dict[str, Any]:
            blocks = [{"address": 0, "size": size, "state": "inactive"} for size in free]
            total = sum(free)
            return {
                "segment_pool_id": pool,
                "stream": stream,
                "total_size": total,
                "allocated_size": 0,
                "blocks": blocks,
            }

        return [segment((0, 0), 1, [1 << 40]), segment(POOL, CAPTURE_STREAM, self.shown())]

    def shown(self) -> list[int]:
        return self.free if self.shows is None else self.shows

    def new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = size * dtype.itemsize
        made = SimpleNamespace(size=size, lent=self.inside, numel=lambda: size)
        if self.inside:
            fits = next((block for block in self.free if block >= nbytes), None)
            if fits is None and self.out_of_memory:
                raise torch.OutOfMemoryError("no more")
            if fits is None:
                # What a pool has grown by stays in it.
                self.reserved += nbytes
                self.free = sorted([*self.free, nbytes])
            else:
                self.free.remove(fits)
                self.free = sorted([*self.free, fits - nbytes])
        return made  # type: ignore[return-value]

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[IdlePool]:
        def call(name: str, inside: bool | None) -> Any:
            def called(device: int, pool: tuple[int, int]) -> None:
                assert (device, pool) == (0, POOL)
                self.calls.append(name)
                self.inside = self.inside if inside is None else inside

            return SimpleNamespace(find=lambda: called)

        patch.setattr(idle_pool, "_BEGIN", call("begin", True))
        patch.setattr(idle_pool, "_END", call("end", False))
        patch.setattr(idle_pool, "_RELEASE", call("release", None))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        patch.setattr(torch.cuda, "memory_reserved", lambda _device: self.reserved)
        patch.setattr(
            torch.cuda, "ExternalStream", lambda stream: SimpleNamespace(cuda_stream=stream)
        )
        streams: set[int] = set()

        def on(stream: Any) -> nullcontext[None]:
            streams.add(stream.cuda_stream)
            return nullcontext()

        patch.setattr(torch.cuda, "stream", on)
        pool = IdlePool(POOL)
        patch.setattr(pool, "_new", self.new, raising=False)
        patch.setattr(pool, "_note", lambda _tensors: None, raising=False)
        yield pool
        assert streams <= {CAPTURE_STREAM}
        assert self.calls == ["begin", "end", "release"] * (len(self.calls) // 3)


def lent(tensors: list[Any]) -> list[bool]:
    return [tensor.lent for tensor in tensors]


def test_as_much_is_lent_as_fits_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(3 * SMALL, 20 * SMALL)
    with allocator.installed(monkeypatch) as pool:
        assert not pool.lends()
        sizes = [12 * MIB, 2 * MIB, 12 * MIB, 16 * MIB, 6 * MIB, MIB // 2]
        found = pool.empty("first", sizes, torch.float32)
        # The second of 12 does not fit any more; one of half a MiB would come from blocks of
        # another kind.
        assert lent(found) == [True, True, False, False, True, False]
        assert [t.numel() for t in found] == sizes
        assert pool.lends() and pool.lent_bytes == 20 * SMALL
        # Another caller, whose pieces live beside those, has what is left.
        assert lent(pool.empty("second", [3 * MIB, 2 * MIB], torch.float32)) == [False, True]
        assert allocator.reserved == 1 << 30
        pool.lend_no_more()
        assert not pool.lends()
        assert lent(pool.empty("first", sizes, torch.float32)) == [False] * 6
        assert lent(pool.empty("third", [2 * MIB], torch.float32)) == [False]


def test_a_pool_that_grew_all_the_same_lends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(4 * SMALL)
    allocator.shows = [4 * SMALL, 8 * SMALL, 8 * SMALL]
    with allocator.installed(monkeypatch) as pool:
        found = pool.empty("one", [3 * MIB, 8 * MIB, 8 * MIB], torch.float32)
        assert lent(found) == [True, False, False]
        assert allocator.reserved == (1 << 30) + 8 * SMALL
        assert lent(pool.empty("two", [2 * MIB], torch.float32)) == [False]


@pytest.mark.parametrize(
    ("blocks", "nbytes", "left"),
    [
        ([4 * SMALL], 2 * SMALL, [2 * SMALL]),
        ([4 * SMALL], 4 * SMALL, []),
        ([2 * SMALL, 4 * SMALL], 2 * SMALL - 100, [4 * SMALL]),
        ([3 * SMALL, 9 * SMALL], 4 * SMALL, [3 * SMALL, 5 * SMALL]),
        # What is left of a block is a block only if it has more than a MiB.
        ([3 * SMALL], 2 * SMALL, []),
        ([3 * SMALL], 2 * SMALL - 512, [SMALL + 512]),
        ([2 * SMALL], 2 * SMALL + 1, None),
        ([9 * SMALL], SMALL, None),
        ([], 2 * SMALL, None),
    ],
)
def test_a_piece_has_the_block_that_the_allocator_would_give_it(
    blocks: list[int], nbytes: int, left: list[int] | None
) -> None:
    before = list(blocks)
    assert idle_pool.fits(blocks, nbytes) is (left is not None)
    assert blocks == (before if left is None else left)


def test_what_is_still_held_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Allocator(SMALL).installed(monkeypatch) as pool:
        monkeypatch.undo()
        tensors = [torch.empty(4) for _ in range(3)]
        pool._note(tensors)
        alias = tensors[1].detach()
        tensors.clear()
        assert pool.still_held() == 1 and pool.still_held() == 0
        del alias


def test_later_steps_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(8 * SMALL)
    with allocator.installed(monkeypatch) as pool:
        sizes = [4 * MIB, 8 * MIB, 3 * MIB]
        first = lent(pool.empty("one", sizes, torch.float32))
        assert first == [True, False, True]
        allocator.free = [8 * SMALL]
        reserved, calls = allocator.reserved, len(allocator.calls)
        again = pool.empty("one", sizes, torch.float32)
        assert lent(again) == first and [t.numel() for t in again] == sizes
        assert allocator.reserved == reserved == 1 << 30
        assert len(allocator.calls) == calls + 3


def test_a_machine_whose_memory_is_full_lends_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(2 * SMALL)
    allocator.out_of_memory = True
    allocator.shows = [2 * SMALL, 4 * SMALL]
    with allocator.installed(monkeypatch) as pool:
        assert lent(pool.empty("one", [2 * MIB, 4 * MIB], torch.float32)) == [True, False]


def test_without_a_pool_nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    monkeypatch.setattr(allocator, "snapshot", list)
    with allocator.installed(monkeypatch) as pool:
        assert lent(pool.empty("one", [2 * MIB] * 2, torch.float32)) == [False, False]
        assert not pool.lends() and not allocator.calls
