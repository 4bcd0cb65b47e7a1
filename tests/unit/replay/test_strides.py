"""Gradients at the border of a graph have the strides that they have in eager training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import ConfigurationError, ReplayMismatchError

STEPS, WARMUP, ROWS, WIDTH = 9, 3, 99, 40
Loss = Callable[[torch.Tensor], torch.Tensor]


class Split(nn.Linear):
    """Returns halves of a transposed result, so that its argument's gradient is transposed."""

    def forward(self, x: torch.Tensor) -> Any:
        y = (x + torch.tanh(super().forward(x))).t()
        return y[:, :30], y[:, 30:]


class Network(nn.Module):
    """Units behind a sum whose bits depend on the order of its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.units = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Split(WIDTH, WIDTH)])
        self.units.append(nn.Linear(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        scale = x.mean(1, keepdim=True).requires_grad_()
        y = self.units[1](torch.cat(self.units[0](self.inner(x) * scale), 1))
        return y, scale


def train(losses: Callable[[int], Loss], graphed: bool) -> tuple[list[Any], Any]:
    """What each step computed, and the counters of graphs."""
    torch.manual_seed(0)
    network, seen = Network(), list[Any]()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)

    def train_step(loss: Loss) -> None:
        y, scale = network(torch.randn(ROWS, WIDTH))
        loss(y).backward()
        seen.extend([scale.grad, *(weight.grad for weight in network.parameters())])
        optimizer.step()
        optimizer.zero_grad()

    if not graphed:
        for step in range(STEPS):
            train_step(losses(step))
        return seen, None
    with graph_units(network, "units.*", backend="tape", warmup_steps=WARMUP) as graphs:
        for step in range(STEPS):
            with graphs.step():
                train_step(losses(step))
    return seen, graphs.counters


LOSSES: dict[str, Loss] = {
    "one number": lambda y: y.sum() * 0.01,
    "a row of numbers": lambda y: (y.sum(0) * torch.linspace(0, 1, WIDTH)).sum(),
    "a column of numbers": lambda y: (y.mean(1) ** 2).sum(),
    "columns first": lambda y: (y.t() @ torch.ones(WIDTH, 3)).square().mean(),
    "as the result": lambda y: y.square().mean(),
}
"""By what the gradient of the last unit's result is."""


@pytest.mark.parametrize("name", LOSSES)
def test_sums_over_gradients_have_the_bits_of_eager_training(name: str) -> None:
    eager, _ = train(lambda _: LOSSES[name], graphed=False)
    graphed, counters = train(lambda _: LOSSES[name], graphed=True)
    assert all(torch.equal(one, two) for one, two in zip(eager, graphed, strict=True))
    assert counters.replayed == 2 * (STEPS - WARMUP)


def test_a_gradient_with_other_strides_than_at_capture_ends_the_run() -> None:
    names = ("as the result", "one number")
    with pytest.raises(ReplayMismatchError, match=r"gradient of result 0 was strides \(40, 1\)"):
        train(lambda step: LOSSES[names[step > WARMUP]], graphed=True)


def test_gradients_with_various_strides_are_refused() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(y.sum() * 0.01, retain_graph=True)
        return y.square().mean()

    with pytest.raises(ConfigurationError, match=r"result 0 is strides \(0, 0\) or strides"):
        train(lambda _: loss, graphed=True)
