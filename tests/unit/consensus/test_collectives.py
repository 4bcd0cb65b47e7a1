"""Which graphs hold collectives: those of the capturing thread, and on all ranks the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from megatron_cg.consensus.collectives import collectives_so_far, without_other_threads
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.integrations.standalone import graph_units
from tests.unit.ranks import on_ranks


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class ReducesInBackward(torch.autograd.Function):
    """A collective in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        reduce()
        return gradient


def backward() -> None:
    apply: Any = ReducesInBackward.apply
    apply(torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("call", [reduce, dist.barrier, backward])
def test_only_collectives_of_the_capturing_thread_count(
    one_rank: None, call: Callable[[], None]
) -> None:
    method = dist.ProcessGroup.allreduce
    with without_other_threads():
        before = collectives_so_far()
        in_a_thread(call)
        assert collectives_so_far() == before
        call()
        after = collectives_so_far()
        assert after > before
        in_a_thread(call)
        assert collectives_so_far() == after
    in_a_thread(call)
    assert collectives_so_far() > after
    assert dist.ProcessGroup.allreduce is method


def test_a_collective_counts_while_another_thread_is_in_one(one_rank: None) -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait(*_args: Any) -> None:
        entered.set()
        leave.wait()

    group = dist.new_group([0])
    slow = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=group))
    with pytest.MonkeyPatch.context() as patch:
        original = dist.ProcessGroup.allreduce

        def allreduce(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            if self is group:
                wait()
            return result

        patch.setattr(dist.ProcessGroup, "allreduce", allreduce)
        with without_other_threads():
            before = collectives_so_far()
            slow.start()
            entered.wait()
            assert collectives_so_far() == before
            functional.all_reduce(torch.ones(1), "sum", [0]).sum()
            during = collectives_so_far()
            assert during > before
            leave.set()
            slow.join()
            assert collectives_so_far() == during


class Unit(nn.Module):
    """Another thread of rank 0 calls a collective of its own during each pass."""

    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            in_a_thread(lambda: self.call(torch.ones(1)))
        out: torch.Tensor = x + self.linear(x)
        return out


def flags_beside_a_thread() -> list[list[bool]]:
    """In one process: which units are taken to hold collectives, for each kind of call."""
    own = dist.new_group([0])
    calls: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda x: dist.all_reduce(x, group=own),
        lambda x: functional.all_reduce(x, "sum", own),
    )
    flags = []
    for call in calls:
        model = nn.Sequential(Unit(call), nn.Linear(4, 4))
        with graph_units(model, "*", backend="tape", warmup_steps=1) as graphs:
            for _ in range(3):
                with graphs.step():
                    model(torch.ones(2, 4)).sum().backward()
            assert graphs.session is not None and graphs.session._capture is not None
            flags.append([one.collectives for one in graphs.session._capture.eager_passes])
            # A unit that votes on one rank alone would not come back from this.
            model.eval()
            model(torch.ones(2, 4))
    return flags


def test_another_thread_of_one_rank_marks_units_on_all_ranks_or_on_none() -> None:
    assert on_ranks(flags_beside_a_thread) == [[[False, False], [True, False]]] * 2


def found_by_each() -> list[list[str]]:
    """In one process: the union of what ranks found, when they found different names and not."""
    votes, rank = Agreement(), dist.get_rank()
    first = votes.confirm(["both", f"rank {rank}"])
    votes.begin_capture()
    second = votes.confirm([])
    votes.begin_capture()
    third = votes.confirm(["second"] if rank else [])
    return [sorted(names) for names in (first, second, third)]


def test_all_ranks_know_what_any_rank_has_found() -> None:
    assert on_ranks(found_by_each) == [[["both", "rank 0", "rank 1"], [], ["second"]]] * 2
