"""Rows in the memory of other GPUs: the kernel that writes them, and ranks that cannot."""

import json
import math
import socket
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.experts import slots as peer_memory
from megatron_cg.experts.slots import PeerMemory, find_places
from tests.unit.interpreted import last_line_of
from tests.unit.ranks import on_ranks

pytestmark = pytest.mark.fault
WRITES = """
import json
import torch
from megatron_cg.experts.kernels import read_rows, write_rows

RANKS, SLOT, RANK = 2, 7, 1
PLACES = [0, 13, 7, 8, 14, 9, 20, 2, 1]
OWN = [place for place in PLACES if 7 <= place < 14]
found = {}
for dtype, width in ((torch.bfloat16, 2048), (torch.float32, 1), (torch.bfloat16, 5),
                     (torch.float32, 700), (torch.uint8, 3), (torch.bfloat16, 768)):
    rows = torch.arange(len(PLACES) * width).view(len(PLACES), width).add(1).to(dtype)
    slots, expected = (
        [torch.zeros(RANKS * SLOT, width, dtype=dtype) for _ in range(RANKS)] for _ in range(2)
    )
    addresses = torch.tensor([of_rank.data_ptr() for of_rank in slots])
    write_rows(rows, torch.tensor(PLACES), addresses, RANK, RANKS * SLOT)
    for row, place in zip(rows, PLACES):
        if place < SLOT:
            expected[place // SLOT][RANK * SLOT + place % SLOT] = row
    found[f"{dtype} {width} written"] = all(map(torch.equal, slots, expected))

    mine = slots[RANK].view(torch.uint8)
    mine.copy_(torch.arange(mine.numel()).view(mine.shape).to(torch.uint8) % 127)
    packed = torch.zeros(RANKS * SLOT, dtype=torch.long)
    packed[OWN] = torch.tensor([PLACES.index(place) for place in OWN])
    places = torch.tensor([3, OWN[1], 14, 0, OWN[2], 6, 4])
    got = read_rows(mine, rows, packed, places, torch.tensor([5]), rank=RANK, slot=SLOT)
    wanted = torch.nn.functional.pad(slots[RANK], (0, 0, 0, 1))
    wanted[OWN] = rows[packed[OWN]]
    found[f"{dtype} {width} read"] = got.shape == (7, width) and torch.equal(
        got[:5].view(torch.uint8), wanted[places[:5]].view(torch.uint8)
    )
print(json.dumps(found))
"""
"""Memory of one process, written to by Triton's interpreter, which is chosen before an import."""


def test_each_row_comes_to_its_place_and_to_no_other() -> None:
    found = json.loads(last_line_of(WRITES))
    assert len(found) == 12 and all(found.values()), found


def stands(function: Any) -> Any:
    """A symbol that is found to be this function."""
    return SimpleNamespace(path="torch:function", find=lambda: function)


def empty(*size: int, device: Any, **named: Any) -> torch.Tensor:
    return torch.empty(*size, **named)


def empty_on_one_rank(*size: int, device: Any, **named: Any) -> torch.Tensor:
    if dist.get_rank():
        raise RuntimeError("CUDA driver error: out of memory\nwhere")
    return empty(*size, device=device, **named)


def refused() -> Any:
    """What each rank raises if the other one runs elsewhere, and if the GPU of one has no room."""
    texts = []
    for host, make in ((f"host-{dist.get_rank()}", empty), ("host", empty_on_one_rank)):
        with (
            patch.object(socket, "gethostname", return_value=host),
            patch.object(torch.cuda, "current_device", return_value=0),
            patch.object(peer_memory, "_EMPTY", stands(make)),
            patch.object(peer_memory, "_RENDEZVOUS", stands(lambda *_: "waits for the others")),
            pytest.raises(CaptureError) as error,
        ):
            made()._made(2**20, 8)
        texts.append(str(error.value))
    return texts


def test_what_one_rank_has_not_is_refused_on_all_of_them() -> None:
    for elsewhere, no_room in on_ranks(refused):
        assert "the 2 expert-parallel ranks cannot map each other's GPU memory" in elsewhere
        assert "they run on host-0, host-1" in elsewhere and "--cg-moe-exchange nccl" in elsewhere
        assert no_room.startswith("expert-parallel rank 1 of 2 cannot allocate 8.0 MiB")
        assert "GPUs write: CUDA driver error: out of memory. --cg-moe-rows 1.25" in no_room


def made() -> PeerMemory:
    group: Any = dist.group.WORLD
    return PeerMemory(group)


@pytest.fixture
def torch_on_cpus(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(peer_memory, "_EMPTY", stands(empty))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("no peer access", r"no peer access\. --cg-moe-exchange peer is for"),
        ("detected allocations from overlapping devices.", r"devices\. .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_memory_that_is_not_mapped_as_it_should_be_is_refused(
    torch_on_cpus: None, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rendezvous(*_: Any) -> Any:
        raise RuntimeError(f"{reason}\nwhere")

    def misplaced(rows: torch.Tensor, _group: Any) -> Any:
        return SimpleNamespace(buffer_ptrs=[rows.data_ptr() - 512], rank=0)

    monkeypatch.setattr(peer_memory, "_RENDEZVOUS", stands(rendezvous))
    with pytest.raises(CaptureError, match=remedy):
        made()._made(4, 8)
    monkeypatch.setattr(peer_memory, "_RENDEZVOUS", stands(misplaced))
    with pytest.raises(UpstreamChangedError, match="where each rank's tensor begins"):
        made()._made(4, 8)


def test_no_slots_are_made_while_a_graph_records(
    torch_on_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="at least one warmup iteration"):
        made()._of(4, 8)


@pytest.fixture
def mapped(torch_on_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(rows: torch.Tensor, _group: Any) -> Any:
        return SimpleNamespace(buffer_ptrs=[rows.data_ptr()], rank=0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(peer_memory, "_RENDEZVOUS", stands(rendezvous))
    as_on_cpu = partial(torch.tensor, dtype=torch.int64)
    monkeypatch.setattr(torch, "tensor", lambda data, **_: as_on_cpu(data))


def test_memory_stays_for_the_next_capture_and_goes_if_that_needs_other_memory(
    mapped: None,
) -> None:
    memory = made()
    first = memory._of(4, 8)
    memory.hold()()
    assert memory._of(4, 8) is first
    leave = memory.hold()
    memory._of(6, 8)
    leave_too = memory.hold()
    assert list(memory._slots) == [(4, 8), (6, 8)]  # Two models have graphs.
    leave()
    leave_too()
    memory._of(8, 8)
    leave = memory.hold()
    assert list(memory._slots) == [(8, 8)]
    memory._of(8, 8)
    memory._of(6, 8)
    memory.forget()  # A capture failed.
    assert list(memory._slots) == [(8, 8)]
    leave()


def is_kept(memory: PeerMemory, other: object) -> bool:
    """Whether something refers to it beside the caller's name, which ``other`` has too.

    Once torch.compile has been used, a call holds its arguments once more.
    """
    return sys.getrefcount(memory) > sys.getrefcount(other)


def test_memory_outlives_its_model_until_its_graphs_are_closed(mapped: None) -> None:
    memory, other = made(), object()
    assert not is_kept(memory, other)
    memory._of(4, 8)
    assert is_kept(memory, other)
    leave = memory.hold()
    assert memory._kept
    memory._of(4, 8)
    leave_too = memory.hold()
    leave()
    assert is_kept(memory, other)
    leave_too()
    del leave, leave_too
    assert not is_kept(memory, other)
    memory._of(4, 8)
    memory.forget()
    assert not is_kept(memory, other) and not memory._slots


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("shape", [(3,), ()], ids=str)
def test_rows_are_written_between_two_barriers_and_read_after_them(
    mapped: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    from megatron_cg.experts import kernels

    memory, done = made(), list[str]()

    def write(rows: torch.Tensor, places: torch.Tensor, _: Any, rank: int, count: int) -> None:
        done.append("write")
        assert rank == 0
        (slots,) = memory._slots.values()
        slots.rows.view(rows.dtype)[places[places < count]] = rows[places < count]

    def read(
        slots: torch.Tensor, rows: torch.Tensor, _: Any, places: Any, used: Any, **named: int
    ) -> torch.Tensor:
        done.append("read")
        assert named == {"rank": 0, "slot": 4} and used == 3
        return slots.view(rows.dtype).index_select(0, places[:used])

    monkeypatch.setattr(kernels, "write_rows", write)
    monkeypatch.setattr(kernels, "read_rows", read)
    sent = torch.arange(1.0, 1.0 + 5 * math.prod(shape)).view(5, *shape)
    here, there = (find_places(torch.tensor([[n]]), 4, rows) for n, rows in ((4, 5), (3, 6)))

    def barrier(channel: int = 0, timeout_ms: int = 0) -> None:
        done.append(f"barrier of {timeout_ms / 60000:g} minutes")

    memory._of(4, math.prod(shape) * 4).handle.barrier = barrier
    received = memory(sent.as_subclass(OnGpu), here, there)
    assert done == ["barrier of 10 minutes", "write", "barrier of 10 minutes", "read"]
    done.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    memory(sent.as_subclass(OnGpu), here, there)
    assert done == ["barrier of 0 minutes", "write", "barrier of 0 minutes", "read"]
    assert torch.equal(received, sent[:3])


def test_nothing_is_freed_on_a_gpu_in_an_error_state(
    mapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    memory, other = made(), object()
    memory._of(4, 8)
    leave = memory.hold()
    memory._of(6, 8)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    memory.forget()
    leave()
    del leave
    assert list(memory._slots) == [(4, 8), (6, 8)] and is_kept(memory, other)
