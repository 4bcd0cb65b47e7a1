"""Units that are called as models of transformers call their layers, without a wrapper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import ConfigurationError
from megatron_cg.integrations.standalone import graph_units
from tests.unit.counted import expect

WIDTH, BATCH, STEPS, WARMUP = 8, 3, 6, 2

Call = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
"""Calls one layer in one step."""


class Layer(nn.Module):
    """A layer with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: Any = None, **ignored: Any) -> torch.Tensor:
        made = torch.tanh(self.up(hidden))
        out: torch.Tensor = hidden + (made if mask is None else made * mask)
        return out


class Network(nn.Module):
    """Two layers, and a weight that masks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.weight = nn.Parameter(torch.ones(WIDTH))


def train(call: Call, graphed: bool) -> tuple[list[torch.Tensor], Any]:
    """The losses and last weights, and the counters of the graphs."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    graphs = (
        graph_units(network, "layers.*", warmup_steps=WARMUP, backend="tape") if graphed else None
    )
    found = []
    with graphs or nullcontext():
        for step in range(STEPS):
            with graphs.step() if graphs else nullcontext():
                optimizer.zero_grad()
                x = network.weight * torch.arange(float(BATCH * WIDTH)).view(BATCH, WIDTH).sin()
                for layer in network.layers:
                    x = call(layer, x, step)
                x.square().sum().backward()
                found.append(x.detach().clone())
                optimizer.step()
        counters = graphs.counters if graphs else None
    return found + [parameter.detach() for parameter in network.parameters()], counters


def assert_graphed(call: Call, eager: int = 0) -> None:
    """Training with and without graphs is equal, and all but ``eager`` calls are replays."""
    expected, _ = train(call, graphed=False)
    found, counters = train(call, graphed=True)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    replayed = (STEPS - WARMUP) * 2 - eager
    expect(counters, captured=2, replayed=replayed, eager=eager, mismatched=eager)


def test_all_tensors_may_be_given_by_keyword() -> None:
    assert_graphed(lambda layer, x, step: layer(mask=torch.full_like(x, step), hidden=x))


def test_an_expanded_mask_is_an_input() -> None:
    def call(layer: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
        mask = torch.arange(float(WIDTH)).add(step).sin()
        out: torch.Tensor = layer(x, mask=mask.expand(BATCH, WIDTH))
        return out

    assert_graphed(call)


def test_a_mask_that_is_expanded_no_longer_runs_eagerly() -> None:
    def call(layer: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
        mask = torch.arange(float(WIDTH)).add(step).sin().expand(BATCH, WIDTH)
        out: torch.Tensor = layer(x, mask=mask * 2 if step == STEPS - 1 else mask)
        return out

    assert_graphed(call, eager=2)


def test_a_cache_of_keys_is_refused_with_what_to_type() -> None:
    def call(layer: nn.Module, x: torch.Tensor, _step: int) -> torch.Tensor:
        out: torch.Tensor = layer(x, past_key_values=object())
        return out

    with pytest.raises(ConfigurationError, match=r"Remedy: .* use_cache=False"):
        train(call, graphed=True)
