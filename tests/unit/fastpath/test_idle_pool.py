"""What is borrowed of a graphs' pool, on an allocator that is made up."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cg.fastpath import optimizer_step
from megatron_cg.fastpath.optimizer_step import SMALL, IdlePool

POOL, CAPTURE_STREAM = (0, 7), 0x51
MIB = (1 << 20) // 4
"""Elements of float32."""


class Allocator:
    """torch's: the smallest free block, split; pieces are merged again when all are gone."""

    def __init__(self, *free: int) -> None:
        self.segments, self.blocks = [*free], [*free]
        """Sizes, and those of the free blocks."""
        self.reserved, self.inside = 1 << 30, False
        self.calls: list[str] = []
        self.shows: list[int] | None = None
        """What its snapshot shows, if not what is free."""
        self.out_of_memory = False
        self.borrowed: dict[int, tuple[StorageWeakRef, int]] = {}

    def free(self) -> list[int]:
        for key, (storage, size) in list(self.borrowed.items()):
            if storage.expired():
                del self.borrowed[key]
                self.blocks = [*self.blocks, size] if self.borrowed else [*self.segments]
        return sorted(self.blocks)

    def snapshot(self) -> list[dict[str, Any]]:
        def segment(pool: tuple[int, int], stream: int, free: list[int]) -> dict[str, Any]:
            blocks = [{"address": 0, "size": size, "state": "inactive"} for size in free]
            found = {"segment_pool_id": pool, "stream": stream, "blocks": blocks}
            return found | {"total_size": sum(free), "allocated_size": 0}

        shown = self.free() if self.shows is None else self.shows
        return [segment((0, 0), 1, [1 << 40]), segment(POOL, CAPTURE_STREAM, shown)]

    def take(self, nbytes: int) -> int:
        """The size of the block for this many bytes, which is in use now."""
        nbytes = -(-nbytes // 512) * 512
        size = next((size for size in self.free() if size >= nbytes), None)
        if size is None and self.out_of_memory:
            raise torch.OutOfMemoryError("no more")
        if size is None:
            self.reserved += nbytes
            self.segments.append(nbytes)
            return nbytes
        self.blocks.remove(size)
        if size - nbytes > SMALL:
            self.blocks.append(size - nbytes)
            return nbytes
        return size

    def new(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        if self.inside:
            size, storage = self.take(made.nbytes), made.untyped_storage()
            self.borrowed[storage._cdata] = StorageWeakRef(storage), size
        return made

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[IdlePool]:
        def call(name: str, inside: bool | None) -> Any:
            def called(device: int, pool: tuple[int, int]) -> None:
                assert (device, pool) == (0, POOL)
                self.calls.append(name)
                self.inside = self.inside if inside is None else inside

            return SimpleNamespace(find=lambda: called)

        patch.setattr(optimizer_step, "_BEGIN", call("begin", True))
        patch.setattr(optimizer_step, "_END", call("end", False))
        patch.setattr(optimizer_step, "_RELEASE", call("release", None))
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
        patch.setattr(pool, "_device", torch.device("cpu"))
        patch.setattr(pool, "_new", self.new)
        yield pool
        assert streams <= {CAPTURE_STREAM}
        assert self.calls == ["begin", "end", "release"] * (len(self.calls) // 3)


def like(*shapes: int | tuple[int, ...]) -> list[torch.Tensor]:
    """Gradients as they lie in a buffer, without memory."""
    shaped = [shape if isinstance(shape, tuple) else (shape,) for shape in shapes]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shaped]


def borrowed(allocator: Allocator, tensors: list[torch.Tensor]) -> list[bool]:
    return [tensor.untyped_storage()._cdata in allocator.borrowed for tensor in tensors]


def test_as_much_is_borrowed_as_fits_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(3 * SMALL, 20 * SMALL)
    with allocator.installed(monkeypatch) as pool:
        assert not pool.borrowed_bytes
        sizes = [12 * MIB, 2 * MIB, 12 * MIB, 16 * MIB, 6 * MIB, MIB // 2]
        found = pool.empty("first", like(*sizes), torch.float32)
        # The second of 12 does not fit any more; one of half a MiB would come from blocks of
        # another kind.
        assert borrowed(allocator, found) == [True, True, False, False, True, False]
        assert [t.numel() for t in found] == sizes
        assert pool.borrowed_bytes == 20 * SMALL
        # Another caller, whose pieces live beside those, has what is left.
        other = pool.empty("second", like(3 * MIB, 2 * MIB), torch.float32)
        assert borrowed(allocator, other) == [False, True]
        assert allocator.reserved == 1 << 30
        held = found[0].detach()
        del found, other
        assert pool.report_held() == 1 and held.numel() and not pool.borrowed_bytes
        for caller in ("first", "third"):
            assert not any(borrowed(allocator, pool.empty(caller, like(2 * MIB), torch.float32)))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_pool_that_has_less_than_it_shows_borrows_no_more(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows, or it raises where all memory is in use."""
    allocator = Allocator(4 * SMALL)
    allocator.shows, allocator.out_of_memory = [4 * SMALL, 8 * SMALL, 8 * SMALL], is_full
    with allocator.installed(monkeypatch) as pool:
        found = pool.empty("one", like(3 * MIB, 8 * MIB, 8 * MIB), torch.float32)
        assert borrowed(allocator, found) == [True, False, False]
        assert allocator.reserved == (1 << 30) + 8 * SMALL * (not is_full)
        assert borrowed(allocator, pool.empty("two", like(2 * MIB), torch.float32)) == [False]


def test_deterministic_algorithms_fill_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fill would run on the capture stream; see Note [What is borrowed]."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    empty = torch.empty

    def of_nothing(size: int, **named: Any) -> torch.Tensor:
        assert size == 0, "fills"
        return empty(size, **named)

    monkeypatch.setattr(torch, "empty", of_nothing)
    with Allocator().installed(monkeypatch) as pool:
        made = IdlePool._new(pool, torch.Size((4, 32)), torch.bfloat16)
    assert made.shape == (4, 32) and made.stride() == (32, 1) and made.dtype is torch.bfloat16
    assert made.untyped_storage().nbytes() == 256


def test_what_is_still_held_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = Allocator(20 * SMALL, 4 * SMALL)
    with allocator.installed(monkeypatch) as pool:
        tensors = pool.empty("one", like(4 * MIB, 8 * MIB, 8 * MIB), torch.float32)
        assert borrowed(allocator, tensors) == [True] * 3
        tensors.clear()
        assert pool.report_held() == 0 and pool.borrowed_bytes and not caplog.records
        tensors = pool.empty("one", like(4 * MIB, 8 * MIB, 8 * MIB), torch.float32)
        aliases = [tensors[1].detach(), tensors[1][:5], tensors[2][:5]]
        tensors.clear()
        assert pool.report_held() == 2 and pool.report_held() == 0
        assert "at least 2 tensors still share" in caplog.text and len(caplog.records) == 1
        assert aliases and not pool.borrowed_bytes


def test_a_caller_of_whom_a_piece_is_held_gets_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(20 * SMALL)
    sizes = like(8 * MIB, (4, MIB), 100)
    with allocator.installed(monkeypatch) as pool:
        found = pool.empty("one", sizes, torch.float32)
        alias = found[0].detach()
        found.clear()
        found = pool.empty("one", sizes, torch.float32)
        assert borrowed(allocator, found) == [False] * 3
        assert [t.shape for t in found] == [t.shape for t in sizes]
        assert allocator.reserved == 1 << 30
        assert pool.borrowed_bytes
        del alias
        found = pool.empty("one", sizes, torch.float32)
        assert borrowed(allocator, found) == [True, True, False]
        alias = found[0].detach()
        found.clear()
        found = pool.empty("one", sizes, torch.float32)
        # It is still to be reported, since a replay would overwrite it.
        assert pool.report_held() == 1 and alias.numel()
