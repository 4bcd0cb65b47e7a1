"""Gradients at the border of a graph have the strides that they have in eager training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import ConfigurationError, ReplayMismatchError
from tests.unit.units.plain import REPLAYED, WARMUP, Training, assert_as_eager, backward

ROWS, WIDTH = 99, 40
"""Of a batch on which sums in another order have other bits."""
Loss = Callable[[torch.Tensor], torch.Tensor]


class Split(nn.Linear):
    """Returns halves of a transposed result, so that its argument's gradient is transposed."""

    def forward(self, x: torch.Tensor) -> Any:
        y = (x + torch.tanh(super().forward(x))).t()
        return y[:, :30], y[:, 30:]


class Network(nn.Module):
    """Two units, behind a product whose gradient is a sum over the rows of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(ROWS, 1))
        self.units = nn.ModuleList([Split(WIDTH, WIDTH), nn.Linear(ROWS, WIDTH)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.units[1](torch.cat(self.units[0](self.inner(x) * self.scale), 1))


def train(choose: Callable[[int], Loss], counts: dict[str, int]) -> None:
    def microbatch(run: Training, _x: torch.Tensor) -> torch.Tensor:
        return backward(choose(run.step)(run.model(torch.randn(ROWS, WIDTH))))

    assert_as_eager(counts, Network, microbatch, units="units.*")


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
    train(lambda _: LOSSES[name], {"replayed": REPLAYED})


def test_a_gradient_with_other_strides_than_at_capture_ends_the_run() -> None:
    names = ("as the result", "one number")
    with pytest.raises(ReplayMismatchError, match=r"gradient of result 0 was strides \(40, 1\)"):
        train(lambda step: LOSSES[names[step > WARMUP]], {})


def test_gradients_with_various_strides_are_refused() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(y.sum() * 0.01, retain_graph=True)
        return y.square().mean()

    with pytest.raises(ConfigurationError, match=r"result 0 is strides \(0, 0\) or strides"):
        train(lambda _: loss, {})
