"""What crosses the boundary of a replayed unit: gradients that are kept, outputs without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.integrations.standalone import graph_units
from tests.unit.counted import expect

WIDTH, ROWS, WARMUP, STEPS, PASSES = 8, 4, 2, 5, 2


class Unit(nn.Module):
    """Also returns a state, which it has detached."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.tanh(self.up(x))) + state
        return x + y, torch.tanh(y).detach()


class Network(nn.Module):
    """Units on learned queries.

    Args:
        way: how the queries come to the first unit.
        recurrent: whether a unit gets the state that it has returned in the last pass.
    """

    def __init__(
        self, way: Callable[[torch.Tensor], torch.Tensor], recurrent: bool = False
    ) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.queries = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.layers = nn.ModuleList(Unit() for _ in range(3))
        self.way = way
        self.states = [torch.zeros(ROWS, WIDTH) for _ in self.layers]
        self.need_gradients: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.way(self.queries)
        for number, layer in enumerate(self.layers):
            y, state = layer(y, self.states[number])
            if self.recurrent:
                self.states[number] = state
            self.need_gradients.append(state.requires_grad)
        return (y * x).square().mean()


def results(*args: Any, graphed: bool, **options: Any) -> Iterator[torch.Tensor]:
    """All losses and gradients of a training run, then which states needed a gradient."""
    torch.manual_seed(0)
    model = Network(*args, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = None
    if graphed:
        graphs = graph_units(model, ["layers.*"], backend="tape", warmup_steps=WARMUP)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with graphs.step() if graphs is not None else nullcontext():
            for _ in range(PASSES):
                loss = model(torch.randn(ROWS, WIDTH))
                loss.backward()
                yield loss.detach()
        yield from [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
    if model.recurrent:
        yield torch.tensor(model.need_gradients)
    if graphs is not None:
        graphs.close()
        # A state outlives its pass: one eager pass of each unit, and copies from then on.
        kept = len(model.layers) if model.recurrent else 0
        replays = (STEPS - WARMUP) * PASSES * len(model.layers) - kept
        expect(graphs.counters, replayed=replays, mismatched=kept)


def assert_equal(*args: Any, **options: Any) -> torch.Tensor:
    """Equal results of an eager run and of one with graphs; returns the last one."""
    eager = list(results(*args, graphed=False, **options))
    replayed = list(results(*args, graphed=True, **options))
    for one, other in zip(eager, replayed, strict=True):
        assert torch.equal(one, other)
    return replayed[-1]


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda queries: queries,
    "a view": lambda queries: queries.view(2, -1).view(ROWS, WIDTH),
    "a sum": lambda queries: torch.ones(ROWS, WIDTH) + queries,
    "far away": lambda queries: sum((torch.zeros(1) for _ in range(20)), queries),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_in_front_of_a_unit_accumulates_its_gradients(way: str) -> None:
    assert_equal(WAYS[way])


def test_an_output_that_needs_no_gradient_needs_none_in_a_replay() -> None:
    needed = assert_equal(WAYS["itself"], recurrent=True)
    assert not needed.any()
