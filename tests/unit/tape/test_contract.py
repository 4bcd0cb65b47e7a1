"""The contract of TE's make_graphed_callables, as the tape keeps it, with collectives too."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import HostSyncError
from megatron_cg.tape.fakes import cpu_fakes
from megatron_cg.tape.tape_backend import TapeBackend, is_recording, recorded_action
from tests.unit.backends.blocks import in_backward, small
from tests.unit.ranks import on_ranks

capture = partial(small, TapeBackend())


class Reading(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        self.read(hidden.detach())
        return hidden


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda t: t.sum().item(), r"aten\._local_scalar_dense"),
        (lambda t: bool(t.any()), r"aten\.\w+"),
        (lambda t: t.nonzero(), r"aten\.nonzero"),
        (lambda t: t[t > 0], r"aten\.\w+"),
        (lambda t: t.masked_select(t > 0), r"aten\.\w+"),
        (lambda t: t.tolist(), r"Tensor\.tolist"),
        (lambda t: torch.rand(2).tolist(), r"Tensor\.tolist"),
        (lambda t: torch.zeros(4).add_(t[0]).tolist(), r"Tensor\.tolist"),
        (lambda t: torch.zeros(2).normal_().tolist(), r"Tensor\.tolist"),
        (lambda t: t.numpy(), r"Tensor\.numpy"),
        (lambda t: t.cpu(), r"Tensor\.cpu"),
        (lambda t: t.to("cpu"), r"Tensor\.to"),
        (lambda t: t.to(device="cpu", dtype=torch.float64), r"Tensor\.to"),
    ],
)
def test_a_read_on_the_host_is_refused_with_op_and_module(
    read: Callable[[torch.Tensor], Any], named: str
) -> None:
    place = r"the callable itself \(Reading\) \(captured as forward of callable 0 \(Reading\)\)"
    with pytest.raises(HostSyncError, match=rf"{named}\S* in {place}"):
        capture(Reading(read))
    assert torch.ones(2).tolist() == torch.ones(2).cpu().to("cpu").tolist() == [1.0, 1.0]
    assert torch.ones(2).numpy().sum() == 2.0


@pytest.mark.parametrize("in_backward", [False, True])
def test_another_thread_reads_waits_and_copies_meanwhile(in_backward: bool) -> None:
    def work() -> list[Any]:
        torch.cuda.synchronize()
        made = torch.tensor([1.0, 2.0]).to(torch.device("cpu"))
        recorded_action(lambda: actions.append(is_recording()))
        return [made.tolist(), made.numpy().sum(), (made * 2).cpu().sum().item(), is_recording()]

    def in_a_thread(*_tensors: torch.Tensor) -> None:
        found.append(pool.submit(work).result())
        assert is_recording() is (len(found) == 2)

    class Later(Reading):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.inner(x)
            hidden.register_hook(in_a_thread)
            return hidden * 1

    found: list[Any] = []
    actions: list[bool] = []
    with cpu_fakes(), ThreadPoolExecutor(1) as pool:
        (graph,) = capture((Later if in_backward else Reading)(in_a_thread), warmups=1)
        assert found == [[[1.0, 2.0], 3.0, 6.0, False]] * 2
        graph(torch.ones(2, 4)).sum().backward()
    assert len(found) == 2 and actions == [False] * 2


@pytest.mark.parametrize(
    ("wait", "named"),
    [
        # Looked up as it is called, when it is a fake.
        (lambda: torch.cuda.synchronize(0), r"torch\.cuda\.synchronize"),
        (lambda: torch.cuda.current_stream().synchronize(), "synchronize of a stream or an event"),
    ],
)
def test_a_wait_for_the_device_is_refused_with_its_module(
    wait: Callable[[], None], named: str
) -> None:
    with cpu_fakes():
        with pytest.raises(HostSyncError, match=rf"{named} in the callable itself \(Reading\)"):
            capture(Reading(lambda _: wait()))
        wait()


def test_a_copy_in_the_backward_pass_is_refused_too() -> None:
    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return in_backward(super().forward(x), torch.Tensor.cpu)

    with pytest.raises(HostSyncError, match=r"Tensor\.cpu in the backward pass \(captured"):
        capture(Module(4, 4))


def test_each_replay_begins_with_a_tensor_of_data_as_it_was_made() -> None:
    class Adding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.full((4,), 2).cumsum(0).tolist()
            total = torch.tensor([*map(float, rows)])
            assert total.sum().item() == 20.0 and len(total.nonzero()) == 4
            total += super().forward(x).sum(0) * torch.tensor(2.0)
            return total + torch.tensor([1.0])

    module = Adding(4, 4)
    (graph,) = capture(module)
    for scale in (1.0, -2.0):
        x = torch.arange(8.0).reshape(2, 4) * scale
        assert torch.equal(graph(x), module(x))


def test_masks_that_need_no_count_are_recorded() -> None:
    def fine(t: torch.Tensor) -> None:
        t[t > 0] = 1.0
        t.index_select(0, torch.zeros(1, dtype=torch.long, device=t.device))
        counts = torch.ones(2, dtype=torch.long, device=t.device)
        t.repeat_interleave(counts, dim=0, output_size=2)
        t.repeat_interleave(2, dim=0)
        with FakeTensorMode():  # Whatever compiles code traces it so.
            torch.ones(2, device=t.device).exp_()

    capture(Reading(fine))


def test_state_on_the_host_that_belongs_to_the_graph_is_taken_along() -> None:
    seen: list[bool] = []

    class Acting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorded_action(lambda: seen.append(is_recording()))
            return super().forward(x)

    (graph,) = capture(Acting(4, 4), warmups=1)
    assert seen == [False, True]
    graph(torch.ones(2, 4))
    assert seen == [False, True, False]


LATE = 0.3
"""Seconds by which one rank comes later to each collective."""


class Summing(nn.Module):
    """Adds what all ranks are given, in the forward and in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed_on = in_backward(x, lambda gradient: total_of(gradient) * 2)
        return total_of(x) * 2 + (passed_on - x.detach())  # zero


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
