"""Plain units in one process, trained eagerly and with graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import GraphedUnits, graph_units
from tests.unit.counted import expect

WIDTH, ROWS, UNITS, WARMUP, STEPS = 8, 4, 2, 2, 5
REPLAYED = (STEPS - WARMUP) * UNITS
"""Replays of two units that run once in each step."""


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


def units(kind: Callable[[], nn.Module] = Unit, number: int = UNITS) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(number))


def in_turn(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def backward(loss: torch.Tensor) -> torch.Tensor:
    """The same, after its backward pass."""
    loss.backward()
    return loss


def train(run: Training, x: torch.Tensor) -> torch.Tensor:
    return backward(in_turn(run.model, x).square().mean())


class Training:
    """A model and its steps; ``microbatch`` runs the passes of one and returns a loss.

    ``before`` is called before each step.
    """

    def __init__(
        self,
        make: Callable[[], Any] = units,
        microbatch: Callable[[Training, torch.Tensor], torch.Tensor] = train,
        microbatches: int = 1,
        before: Callable[[Training], object] = lambda _run: None,
    ) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.microbatch, self.microbatches, self.before = microbatch, microbatches, before
        self.step = self.number = 0
        """Of the step, and of the microbatch in it."""
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.1)

    def graphs(self, units: str = "*", *, backend: Any = "tape", **options: Any) -> GraphedUnits:
        return graph_units(self.model, units, backend=backend, **{"warmup_steps": WARMUP} | options)

    def run(self, graphs: GraphedUnits | None = None) -> Iterator[torch.Tensor | None]:
        """Losses, gradients (None where a weight has none) and weights."""
        for step in range(STEPS):
            self.step = step
            self.before(self)
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            with graphs.step() if graphs is not None else nullcontext():
                for number in range(self.microbatches):
                    self.number = number
                    x = torch.randn(ROWS, WIDTH, dtype=torch.float32, requires_grad=True)
                    yield self.microbatch(self, x).detach()
                    yield x.grad
                for weight in self.model.parameters():
                    yield None if weight.grad is None else weight.grad.clone()
                self.optimizer.step()
        yield from (weight.detach().clone() for weight in self.model.parameters())


def same(eager: Iterable[torch.Tensor | None], graphed: Iterable[torch.Tensor | None]) -> bool:
    """Whether two runs have the same bits, and no gradient in the same places."""
    pairs = list(zip(eager, graphed, strict=True))
    return all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in pairs
    )


def refused(error: type[Exception], words: str, *of_training: Any, units: str = "*") -> Any:
    training = Training(*of_training)
    with training.graphs(units) as graphs, pytest.raises(error, match=words) as raised:
        list(training.run(graphs))
    return raised.value


def assert_as_eager(
    counts: dict[str, int], *of_training: Any, units: str = "*", **options: Any
) -> None:
    """Train eagerly and with graphs: the same bits, and these counts of the graphs."""
    eager, graphed = Training(*of_training), Training(*of_training)
    if options.get("separate_inputs"):
        with eager.graphs(units, warmup_steps=STEPS + 1, separate_inputs=True) as never:
            expected = list(eager.run(never))
    else:
        expected = list(eager.run())
    with graphed.graphs(units, **options) as graphs:
        found = list(graphed.run(graphs))
        expect(graphs.counters, **counts)
    assert same(expected, found)
