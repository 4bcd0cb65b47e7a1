"""Activation checkpointing around a unit: refused before the capture, and run eagerly after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg import GraphedUnits, graph_units
from megatron_cg.errors import ConfigurationError
from tests.unit.counted import expect

WIDTH, STEPS, CAPTURED = 4, 5, 2
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "not reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
}


class Network(nn.Module):
    """Two units; the checkpointed function has other operations around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.checkpoint: Callable[..., Any] = lambda fn, x: fn(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:

            def around(y: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
                out: torch.Tensor = torch.sin(layer(torch.tanh(y)))
                return out

            x = self.checkpoint(around, x)
        return x


class Run:
    """A network and its steps; ``around`` is entered for the forward pass of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Network()
        self.graphs: GraphedUnits | None = None
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        with self.graphs.step() if self.graphs is not None else nullcontext():
            self.optimizer.zero_grad()
            x = torch.arange(3.0 * WIDTH).reshape(3, WIDTH).add(number).sin()
            with self.around():
                loss = self.network(x).square().sum()
            loss.backward()
            self.optimizer.step()

    def with_graphs(self) -> GraphedUnits:
        self.graphs = graph_units(self.network, "layers.*", warmup_steps=CAPTURED, backend="tape")
        return self.graphs


def equal(one: Run, two: Run) -> bool:
    pairs = zip(one.network.parameters(), two.network.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def trained_with_checkpoints_later(how: str) -> tuple[Run, Run]:
    """An eager run and one with graphs, which checkpoint two steps after the capture."""
    eager, graphed = Run(), Run()
    with graphed.with_graphs():
        for run in (eager, graphed):
            for number in range(STEPS):
                if number == STEPS - 1:
                    run.network.checkpoint = CHECKPOINTS[how]
                run.step(number)
    return eager, graphed


def refused(run: Run) -> list[str]:
    with run.with_graphs() as graphs:
        for number in range(CAPTURED):
            run.step(number)
        with pytest.raises(ConfigurationError) as error, graphs.step():
            pass
    assert [v.rule for v in error.value.violations] == ["unit-recomputed"] * 2
    return str(error.value).splitlines()


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_unit_that_is_recomputed_is_refused(how: str) -> None:
    run = Run()
    run.network.checkpoint = CHECKPOINTS[how]
    text = "\n".join(refused(run))
    assert "unit layers.1 was called" in text and "put the checkpoint inside the unit" in text


def test_a_unit_under_saved_tensor_hooks_is_refused() -> None:
    run = Run()
    run.around = torch.autograd.graph.save_on_cpu
    assert "under saved-tensor hooks" in "\n".join(refused(run))


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_that_begins_after_the_capture_runs_eagerly(how: str) -> None:
    eager, graphed = trained_with_checkpoints_later(how)
    assert equal(eager, graphed)
    assert graphed.graphs is not None
    replayed = 2 * (STEPS - CAPTURED - 1)
    expect(graphed.graphs.counters, replayed=replayed, eager=2 * 2, mismatched=2 * 2)
