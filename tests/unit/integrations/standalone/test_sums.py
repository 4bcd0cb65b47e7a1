"""Gradients that autograd sums over uses inside a unit and uses outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import ConfigurationError
from tests.unit.counted import expect

WIDTH, WARMUP, STEPS = 6, 2, 5


class Unit(nn.Module):
    """Uses its input twice, as a residual does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) / 3


class AsOneUse(Unit):
    """Autograd sums its two uses first, as a graph does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view_as(x))


class Once(Unit):
    """Uses its input once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) / 3


class Network(nn.Module):
    """Two units, each with one more use of its input after it, before it, or with none."""

    def __init__(self, kind: type[Unit], outside: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.outside == "before":
                x = x.sin() * 3 + layer(x)
            else:
                out = layer(x)
                x = out + x.sin() * 3 if self.outside == "after" else out
        return x


def trained(network: Network, graphs: Any = None) -> Iterator[torch.Tensor]:
    """Losses, gradients of the input and weights."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for number in range(STEPS):
        torch.manual_seed(number)
        x = torch.randn(64, WIDTH, requires_grad=True)
        optimizer.zero_grad()
        with graphs.step() if graphs is not None else nullcontext():
            loss = network(x).square().mean()
            loss.backward()
            optimizer.step()
        assert x.grad is not None
        yield from (loss.detach(), x.grad)
    yield from (parameter.detach().clone() for parameter in network.parameters())


def network_of(kind: type[Unit], outside: str) -> Network:
    torch.manual_seed(0)
    return Network(kind, outside)


def test_an_input_that_is_used_twice_inside_and_later_outside_is_refused() -> None:
    """All such units are named at once, and with what."""
    network = network_of(Unit, "after")
    with (
        graph_units(network, "layers.*", backend="tape", warmup_steps=WARMUP) as graphs,
        pytest.raises(ConfigurationError) as error,
    ):
        list(trained(network, graphs))
    found = [(one.rule, one.found) for one in error.value.violations]
    said = "x, used 2 times inside and 1 times later outside"
    assert found == [("unit-shared-gradients", f"unit layers.{n}: {said}") for n in range(2)]
    assert "x.view_as(x)" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "outside"),
    [(AsOneUse, "after"), (Once, "after"), (Unit, "before"), (Unit, "no"), (AsOneUse, "before")],
)
def test_other_sums_have_the_bits_of_eager_training(kind: type[Unit], outside: str) -> None:
    eager = trained(network_of(kind, outside))
    network = network_of(kind, outside)
    with graph_units(network, "layers.*", backend="tape", warmup_steps=WARMUP) as graphs:
        graphed = trained(network, graphs)
        assert all(torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
        expect(graphs.counters, replayed=2 * (STEPS - WARMUP), mismatched=0)
