"""What the doubles of CUDA's names record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Work, _coalescing_manager

from megatron_cg.fastpath.gradients import bucketing as gradients
from megatron_cg.fastpath.gradients import streams as fast_streams
from tests.unit.ordering.check import races
from tests.unit.ordering.doubles.collectives import Collectives
from tests.unit.ordering.doubles.device import modelled_device
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.doubles.streams import Streams
from tests.unit.ordering.report import described
from tests.unit.ordering.trace import Allocate, Entry, HostReads, Launch, Release, Span


@pytest.fixture
def notes(one_rank: None) -> Iterator[Notes]:
    """A trace that is on."""
    with modelled_device() as made, made.tracing():
        yield made


def launches(notes: Notes) -> list[Launch]:
    return [entry for entry in notes.trace.entries if isinstance(entry, Launch)]


def storages(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in spans]


def found(notes: Notes) -> int:
    return len(races(notes.trace.entries))


def taken(notes: Notes, *kinds: type[Entry]) -> list[Any]:
    """The entries of these kinds, which are then forgotten."""
    made = [entry for entry in notes.trace.entries if isinstance(entry, kinds)]
    notes.trace.entries.clear()
    return made


def test_all_is_undone() -> None:
    def everything() -> dict[str, object]:
        here = {f"cuda.{name}": value for name, value in vars(torch.cuda).items()}
        here |= {f"group.{name}": value for name, value in vars(ProcessGroup).items()}
        here |= {"wait": Work.wait, "resize": torch.UntypedStorage.resize_}
        here |= {"record_stream": torch.Tensor.record_stream}
        return here | {
            "own": vars(gradients)["current_stream"],
            "named": fast_streams.current_stream,
        }

    before = everything()
    with pytest.raises(KeyboardInterrupt), modelled_device():
        assert everything() != before
        assert vars(gradients)["current_stream"]() == fast_streams.current_stream() == 0
        with torch.cuda.stream(torch.cuda.Stream()):
            assert vars(gradients)["current_stream"]() == fast_streams.current_stream() == 1
        raise KeyboardInterrupt
    assert everything() == before


def test_bytes_of_operations(notes: Notes) -> None:
    """A new result, an update in place, one of many tensors at once, and views."""
    x = torch.zeros(4, 4)
    x[1:3].add_(x[0])
    torch._foreach_copy_([x[0], x[3]], [x[1], x[1]])
    torch.add(x[0], x[1], out=x[2])
    assert x.t()[1].shape == (4,)
    made, added, copied, out = launches(notes)
    assert (storages(made.reads), storages(made.writes)) == ([], [(0, 64)])
    assert (storages(added.reads), storages(added.writes)) == ([(0, 16)], [(16, 48)])
    assert storages(copied.writes) == [(0, 16), (48, 64)] and set(storages(copied.reads)) == {
        (16, 32)
    }
    assert (storages(out.reads), storages(out.writes)) == ([(0, 16), (16, 32)], [(32, 48)])
    assert made.site is not None and made.site.file.endswith("ordering/test_doubles.py")


def test_a_columns_bytes_reach_from_its_first_to_its_last(notes: Notes) -> None:
    x = torch.zeros(4, 4)
    taken(notes, Launch)
    x[:, 1].zero_()
    (zeroed,) = launches(notes)
    assert storages(zeroed.writes) == [(4, 4 + 12 * 4 + 4)]


def test_memory_comes_and_goes(notes: Notes) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(4)
    view = x[1:]
    del x
    (allocated,) = taken(notes, Allocate, Release)
    assert allocated.stream == side.cuda_stream
    del view
    assert taken(notes, Allocate, Release) == [Release(allocated.storage)]
    y = torch.zeros(4)
    (again,) = taken(notes, Allocate, Release)
    assert again.storage != allocated.storage
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(16)
    gone, back = taken(notes, Allocate, Release)
    assert (gone, back.storage) == (Release(again.storage), again.storage)


def test_backward_passes_and_hooks_are_seen(notes: Notes) -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def double(parameter: Any) -> None:
        parameter.grad.mul_(2)

    weight.register_post_accumulate_grad_hook(double)
    loss = (weight * 3).sum()
    taken(notes, Launch)
    loss.backward()
    assert [one.name for one in launches(notes)][-1] == "aten.mul_.Tensor"


def test_reading_a_value_waits_and_views_do_nothing(notes: Notes) -> None:
    x = torch.ones(2)
    taken(notes, Launch)
    assert x.sum().item() == 2.0 and x.view(1, 2).shape == (1, 2)
    names = [one.name for one in launches(notes)]
    assert names == ["aten.sum.default", "aten._local_scalar_dense.default"]
    assert len(taken(notes, HostReads)) == 1


@pytest.mark.parametrize(
    ("waits", "expected"), [("", 1), ("stream", 0), ("event", 0), ("device", 0), ("late", 1)]
)
def test_streams_and_events(notes: Notes, waits: str, expected: int) -> None:
    x, side = torch.zeros(2), torch.cuda.Stream()
    event = torch.cuda.Event()
    if waits == "late":
        event.record()
    x.add_(1)
    if waits == "stream":
        side.wait_stream(torch.cuda.current_stream())
    if waits == "event":
        event.record()
    if waits in ("event", "late"):
        event.wait(side)
    if waits == "device":
        torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    assert found(notes) == expected


def test_a_gather_runs_beside_what_follows_until_it_is_waited_for(notes: Notes) -> None:
    whole, shard = torch.zeros(2), torch.ones(2)
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    shard.sum()
    assert found(notes) == 0  # Both read the shard.
    work.wait()
    whole.sum()
    shard.zero_()
    assert found(notes) == 0
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    whole.sum()
    shard.zero_()
    assert found(notes) == 2
    work.wait()


def test_a_gather_waits_for_the_stream_that_is_current_at_the_call(notes: Notes) -> None:
    whole, shard, side = torch.zeros(2), torch.ones(2), torch.cuda.Stream()
    with torch.cuda.stream(side):
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        assert found(notes) == 2
        work.wait()
    taken(notes, Launch)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), _coalescing_manager(dist.group.WORLD, async_ops=True) as works:
        dist.all_gather_into_tensor(whole, shard, async_op=True)
    works.wait()
    whole.sum()
    assert found(notes) == 0


def test_a_collective_that_is_not_asynchronous_runs_on_the_current_stream(notes: Notes) -> None:
    x, side = torch.zeros(2), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
        x.sum()
    assert found(notes) == 0 and launches(notes)[-2].stream == side.cuda_stream
    x.sum()
    assert found(notes) == 1


def test_a_collective_that_is_not_modelled_is_not_passed_over() -> None:
    with pytest.raises(NotImplementedError, match="c10d::send"):
        Collectives(Streams(Notes())).launch("c10d::send", (), ())


def test_record_stream_keeps_memory(notes: Notes) -> None:
    for kept in (True, False):
        x, side = torch.zeros(2), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if kept:
            x.record_stream(side)
        del x
        torch.zeros(2)
        assert found(notes) == (not kept)
        notes.trace.entries.clear()


def test_an_error_names_both_operations_and_the_memory(notes: Notes) -> None:
    x, side = torch.zeros(2), torch.cuda.Stream()
    notes.name(x, "the weights")
    with torch.cuda.stream(side):
        x[1:].add_(1)
    (text,) = described(notes.trace, races(notes.trace.entries))
    first, _, second = text.partition(" writes bytes 4 to 8 of the weights without waiting for ")
    assert first.startswith("aten.add_.Tensor at ") and "on the stream made at " in first
    assert second.startswith("aten.zeros.default at ") and second.endswith(" on the main stream")
    assert first.count("test_doubles.py:") == 2 and second.count("test_doubles.py:") == 1
