"""What a tape does at a replay: the same bits as eager, and a graph's blindness."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.tape.tape_backend import FreedStorageError, TapeBackend
from tests.unit.backends import blocks
from tests.unit.backends.blocks import Scale

capture = partial(blocks.capture, TapeBackend())


def test_a_parameter_that_was_moved_is_read_at_its_old_address() -> None:
    module = Scale()
    old = module.weight.data
    (graph,) = capture((module,))
    module.weight.data = torch.full((8,), 7.0)
    assert torch.equal(graph(torch.ones(4, 8)), torch.full((4, 8), 2.0))
    assert torch.equal(module(torch.ones(4, 8)), torch.full((4, 8), 7.0))
    old.fill_(5.0)
    assert torch.equal(graph(torch.ones(4, 8)), torch.full((4, 8), 5.0))


@pytest.mark.parametrize("how", ["resized", "dropped", "allocated again"])
def test_memory_that_was_freed_is_an_error(how: str) -> None:
    module = Scale()
    (graph,) = capture((module,))
    if how == "dropped":
        module.weight.data = torch.zeros(8)
    else:
        # New memory is allocated before the old is freed, so the two have different addresses.
        module.weight.untyped_storage().resize_(0 if how == "resized" else 64)
    with pytest.raises(FreedStorageError, match=r"32 bytes that aten\.mul.*was freed since"):
        graph(torch.ones(4, 8))


def test_a_kernel_that_depends_on_grad_mode_is_replayed_as_it_was_recorded() -> None:
    module = nn.LSTM(8, 8)
    (graph,) = capture((module,))
    found = []
    for run in (module, graph):
        x = torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
        module.zero_grad()
        outputs, _ = run(x)
        outputs.sum().backward()
        found.append([outputs, x.grad, *(weight.grad for weight in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Leaky(Scale):
    """Keeps a temporary of its forward, which a graph's pool may give to another graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = (x.detach() + 1.0) * 2.0
        return super().forward(x)


def test_a_stale_read_of_pool_memory_gives_nan() -> None:
    module = Leaky()
    (graph,) = capture((module,))
    assert module.kept.isnan().all()
    graph(torch.ones(4, 8))
    assert module.kept.isnan().all()


class ReadsTooEarly(nn.Module):
    """Reads what its last pass left in memory, then writes there, in each of its two passes."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return early_and_late(x)

        @staticmethod
        def backward(ctx: Any, first: torch.Tensor, late: torch.Tensor) -> Any:
            early, late = early_and_late(first)
            return early + late

    def forward(self, x: torch.Tensor) -> Any:
        found: Any = self.Double.apply(x)  # type: ignore[no-untyped-call]
        return found


def early_and_late(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    late = torch.empty_like(x)
    early = late.clone()
    late.copy_(x)
    return early, late


def test_a_read_of_what_the_last_replay_left_in_the_tapes_own_memory_gives_nan() -> None:
    """On a GPU it would be the numbers of the step before."""
    (graph,) = capture((ReadsTooEarly(),))
    for value in (1.0, 2.0, 3.0):
        x = torch.full((4, 8), value, requires_grad=True)
        early, late = graph(x)
        assert early.isnan().all() and torch.equal(late, x)
        early.sum().backward()
        assert x.grad is not None and x.grad.isnan().all()


def test_activations_are_poisoned_after_their_backward_and_outputs_when_shared() -> None:
    module = Scale()
    (graph,) = capture((module,), share_buffers=True)
    output = graph(torch.ones(4, 8))
    assert torch.equal(output, torch.full((4, 8), 2.0))
    output.sum().backward()
    assert output.isnan().all()


class Joined(nn.Module):
    """Its input's gradient and its weight's are two parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.weight]) * 3.0


@pytest.mark.parametrize("kind", [Joined, Scale])
def test_the_next_replay_takes_a_borrowed_gradient_back_unless_an_inputs_is_beside_it(
    kind: type[nn.Module],
) -> None:
    module = kind()
    graph, other = capture((module, Scale()))
    end = graph.replay_function().borrow()
    inputs = torch.ones(4, 8, requires_grad=True)
    found = torch.autograd.grad(graph(inputs).sum(), [inputs, *module.parameters()])
    before = [gradient.clone() for gradient in found]
    assert all(gradient.isfinite().all() for gradient in before)
    other(torch.ones(4, 8))
    assert torch.equal(found[0], before[0])
    assert found[0].untyped_storage()._cdata != found[1].untyped_storage()._cdata
    beside = found[0].data_ptr() + found[0].nbytes == found[1].data_ptr()
    assert beside or kind is not Joined
    assert bool(found[1].isnan().all()) is (kind is not Joined)
    end()
    copied = torch.autograd.grad(graph(inputs).sum(), list(module.parameters()))
    other(torch.ones(4, 8))
    assert torch.equal(copied[0], before[1])
