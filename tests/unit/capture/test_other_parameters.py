"""A unit that uses parameters of other modules is refused; one that shares them is not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import CaptureError


class Scaled(nn.Module):
    """Scales by a weight of another module, as an attribute of its own or not."""

    def __init__(self, other: nn.Linear, *, own: bool) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), [other]
        if own:
            self.shared = other.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(x) * self.other[0].weight.sum()
        return scaled


class Network(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.unit = Scaled(self.first, own=own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.unit(self.first(x))
        return made


def train(network: Network, graphs: Any = None) -> torch.Tensor:
    for _ in range(3):
        with graphs.step() if graphs is not None else nullcontext():
            network.zero_grad()
            network(torch.ones(2, 4)).sum().backward()
    assert network.first.weight.grad is not None
    return network.first.weight.grad


def test_a_gradient_that_would_be_lost_ends_the_capture() -> None:
    network = Network(own=False)
    hooks = [parameter._backward_hooks for parameter in network.parameters()]
    with (
        graph_units(network, ["unit"], warmup_steps=1, backend="tape") as graphs,
        pytest.raises(CaptureError, match=r"unit uses first\.weight, a parameter of a module"),
    ):
        train(network, graphs)
    for parameter, before in zip(network.parameters(), hooks, strict=True):
        assert not parameter._backward_hooks and not before


def test_a_weight_that_is_the_units_too_gets_its_gradient() -> None:
    expected = train(Network(own=True))
    network = Network(own=True)
    with graph_units(network, ["unit"], warmup_steps=1, backend="tape") as graphs:
        assert torch.equal(train(network, graphs), expected)
        assert graphs.counters.replayed == 2
