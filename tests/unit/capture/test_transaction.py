"""After the passes of a capture all tensors of a module are as before: the same ones and values."""

from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from megatron_cg.capture.transaction import (
    buffers_kept,
    compiled_kept,
    frozen_kept,
    gradients_kept,
    without_gradients,
)


class Net(nn.Module):
    """A buffer that is there and one that is not, a frozen and a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor = nn.Buffer(torch.zeros(2))
        self.register_buffer("absent", None)
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.frozen.requires_grad_(False)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_buffers_frozen_parameters_and_gradients_are_as_before(fails: bool, replaced: bool) -> None:
    net: Any = Net()
    net.weight.grad = torch.full((2,), 3.0)
    before = {**net._buffers, **net._parameters, "grad": net.weight.grad}
    values = {name: tensor.clone() for name, tensor in before.items() if tensor is not None}
    called: list[torch.Tensor] = []
    net.weight.register_post_accumulate_grad_hook(called.append)
    with suppress(KeyError), ExitStack() as stack:
        for kept in (buffers_kept([net]), frozen_kept([net]), gradients_kept([net.weight])):
            stack.enter_context(kept)
        with without_gradients([net.weight]):
            assert net.weight.grad is None
            (net.weight * 2).sum().backward()
            made: Any = net.weight.grad
            assert made.tolist() == [2.0, 2.0] and not called
        assert net.weight.grad is before["grad"]
        net.count.add_(1)
        net.frozen.data.add_(1)
        net.weight.grad = None
        if replaced:
            net.count = torch.ones(2)
        if fails:
            raise KeyError
    now = {**net._buffers, **net._parameters, "grad": net.weight.grad}
    assert all(now[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(now[name], value) for name, value in values.items())
    net.weight.sum().backward()
    assert len(called) == 1


@pytest.mark.parametrize(("before", "compiled"), [((8,), 1), ((8, 9), 0)])
def test_eager_passes_keep_their_compiled_code(before: tuple[int, ...], compiled: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    twice = torch.compile(lambda x: x * 2, backend=counter)
    for size in before:
        twice(torch.ones(size))
    with compiled_kept():
        twice(torch.ones(20))
    assert counter.frame_count == len(before) + compiled
    # Code that was compiled last is tried first: for any size it would take this one too.
    shapes = [torch.ones(size) for size in before]
    with torch.compiler.set_stance("fail_on_recompile"):
        for given in shapes:
            twice(given)
    twice(torch.ones(33))
    assert counter.frame_count == len(before) + 2 * compiled
