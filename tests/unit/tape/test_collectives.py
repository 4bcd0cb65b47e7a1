"""Collectives on a tape: over when what follows reads their result, as by a stream's order."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.ranks import on_ranks

LATE = 0.3
"""Seconds by which one rank comes later to each collective."""


class Summing(nn.Module):
    """Adds what all ranks are given, in the forward and in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = Summed.apply(x)  # type: ignore[no-untyped-call]
        return summed


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return total_of(x) * 2

    @staticmethod
    def backward(_ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return total_of(gradients[0]) * 2


FUNCTIONAL = False
"""Whether the sum is a functional collective, as in compiled code; set in each process."""


def total_of(x: torch.Tensor) -> torch.Tensor:
    if FUNCTIONAL:
        group = dist.distributed_c10d._get_default_group().group_name
        started = torch.ops._c10d_functional.all_reduce(x.detach(), "sum", group)
        summed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return summed
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def replayed(functional: bool) -> list[list[float]]:
    """Outputs and gradients of two replays, which rank 1 comes to later than rank 0."""
    global FUNCTIONAL
    FUNCTIONAL = functional
    rank = dist.get_rank()
    sample = torch.ones(3, requires_grad=True)
    (graph,) = TapeBackend().capture(CaptureRequest((Summing(),), [(sample,)]))
    found: list[list[float]] = []
    for step in range(2):
        x = torch.full((3,), 1.0 + rank + step, requires_grad=True)
        time.sleep(LATE * rank)
        out = graph(x)
        found.append(out.tolist())
        time.sleep(LATE * rank)
        out.backward(torch.full((3,), 10.0 * (1 + rank)))
        assert x.grad is not None
        found.append(x.grad.tolist())
    return found


@pytest.mark.parametrize("functional", [False, True])
def test_a_replay_waits_for_the_ranks_that_come_later(functional: bool) -> None:
    for found in on_ranks(partial(replayed, functional)):
        assert found == [[6.0] * 3, [60.0] * 3, [10.0] * 3, [60.0] * 3]
