"""Outputs of units that a loop keeps while the same units run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from tests.unit.counted import expect

ROWS, WIDTH, STEPS, WARMUP = 4, 6, 5, 2


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.tanh(self.up(x))))


class Network(nn.Module):
    """Two units and a head."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unit() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.layers.requires_grad_(not frozen)

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def two_views(network: Network, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Both passes come before the backward pass of what follows the units."""
    first, second = network.encoded(one), network.encoded(two)
    found: torch.Tensor = network.head(first).square().sum() + network.head(second).sin().sum()
    return found


def cut_off_target(network: Network, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The backward pass of the first pass never comes, and its output is a target."""
    target = network.encoded(one).detach()
    found: torch.Tensor = (network.head(network.encoded(two)) - target).square().sum()
    return found


Passes = Callable[[Network, torch.Tensor, torch.Tensor], torch.Tensor]


def results(passes: Passes, *, frozen: bool, graphed: bool) -> Iterator[torch.Tensor]:
    """All losses of a training run, and the weights at its end."""
    torch.manual_seed(0)
    network: Any = Network(frozen=frozen)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.01)
    graphs = None
    if graphed:
        graphs = graph_units(network, ["layers.*"], backend="tape", warmup_steps=WARMUP)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with graphs.step() if graphs is not None else nullcontext():
            loss = passes(network, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
            loss.backward()
            yield loss.detach()
        optimizer.step()
    if graphs is not None:
        graphs.close()
        eager = 0 if frozen else (STEPS - WARMUP) * 2
        replayed = (STEPS - WARMUP) * 4 - eager
        expect(graphs.counters, replayed=replayed, eager=eager, mismatched=eager)
    yield from [one.detach() for one in network.parameters()]


@pytest.mark.parametrize("passes", [two_views, cut_off_target])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_output_that_is_kept_is_not_overwritten(passes: Passes, *, frozen: bool) -> None:
    eager = list(results(passes, frozen=frozen, graphed=False))
    replayed = list(results(passes, frozen=frozen, graphed=True))
    assert len(eager) == len(replayed)
    assert all(map(torch.equal, eager, replayed))


def test_what_a_verification_leaves_in_modules_is_no_output_in_use() -> None:
    """Megatron's token dispatcher keeps the input of an eager pass, another unit's output."""

    class Keeping(Unit):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = [None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept[0] = x
            return super().forward(x)

    Keeping.__module__ = "megatron.core.made_up"  # Known, so what it keeps is not observed.
    network = Network(frozen=False)
    network.layers[1] = Keeping()
    graphs = graph_units(network, ["layers.*"], backend="tape", warmup_steps=WARMUP)
    with graphs:
        for step in range(STEPS):
            with graphs.step():
                network.encoded(torch.full((ROWS, WIDTH), 0.1 * step)).sum().backward()
        expect(graphs.counters, captured=2, replayed=2 * (STEPS - WARMUP))
