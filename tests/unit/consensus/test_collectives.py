"""Whether code called collectives is seen from the counters of all process groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from megatron_cg.capture.observer import collectives_so_far


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


class ReducesInBackward(torch.autograd.Function):
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


def in_another_group() -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))


def functionally() -> None:
    functional.all_reduce(torch.ones(1), "sum", [0]).sum()


@pytest.mark.parametrize("call", [reduce, dist.barrier, backward, in_another_group, functionally])
def test_every_collective_counts(one_rank: None, call: Callable[[], None]) -> None:
    before = collectives_so_far()
    torch.ones(1).sum()
    assert collectives_so_far() == before
    call()
    assert collectives_so_far() > before


def test_without_process_groups_there_are_none() -> None:
    assert collectives_so_far() == 0
