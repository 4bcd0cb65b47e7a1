"""Inputs that a unit returns, and that come back as another input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from megatron_cg import graph_units
from tests.unit.counted import expect

ROWS, WIDTH, STEPS, WARMUP, PASSES = 4, 6, 4, 2, 3


class Shifted(nn.Module):
    """Mixes each pass with the one before; returns its input as the state of the next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.before = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.now(x) + self.before(state), x.view(-1).view(x.shape)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Shifted()
        self.state = torch.zeros(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.state = self.unit(x, self.state)
        return torch.as_tensor(y).square().mean()


def losses(*, graphed: bool) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    network: Any = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    graphs = (
        graph_units(network, ["unit"], backend="tape", warmup_steps=WARMUP) if graphed else None
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        with graphs.step() if graphs is not None else nullcontext():
            for _ in range(PASSES):
                loss = network(torch.randn(ROWS, WIDTH))
                loss.backward()
                yield loss.detach()
        optimizer.step()
    if graphs is not None:
        graphs.close()
        # The state outlives its pass: one eager pass, and copies from then on.
        expect(graphs.counters, replayed=(STEPS - WARMUP) * PASSES - 1, mismatched=1)


def test_an_input_that_comes_back_is_read_before_it_is_overwritten() -> None:
    assert list(losses(graphed=False)) == list(losses(graphed=True))
