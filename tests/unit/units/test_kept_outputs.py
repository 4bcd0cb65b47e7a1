"""Outputs and inputs of units that a loop keeps while the same units run again."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.units.plain import (
    REPLAYED,
    ROWS,
    STEPS,
    WARMUP,
    WIDTH,
    Training,
    Unit,
    assert_as_eager,
    backward,
    in_turn,
    units,
)


class Network(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers, self.head = units(), nn.Linear(WIDTH, WIDTH)
        self.layers.requires_grad_(not frozen)


def cut_off_target(run: Training, x: torch.Tensor) -> torch.Tensor:
    """The backward pass of the first pass never comes, and its output is a target."""
    target = in_turn(run.model.layers, x.detach()).detach()
    loss: torch.Tensor = (
        run.model.head(in_turn(run.model.layers, x.cos().detach())) - target
    ).sum()
    loss.square().backward()
    return loss


@pytest.mark.parametrize("frozen", [False, True])
def test_an_output_that_is_kept_is_not_overwritten(frozen: bool) -> None:
    eager = 0 if frozen else REPLAYED
    counts = {"replayed": 2 * REPLAYED - eager, "eager": eager, "mismatched": eager}
    assert_as_eager(counts, partial(Network, frozen), cut_off_target, units="layers.*")


def by_grad(run: Any, hidden: torch.Tensor, loss: torch.Tensor) -> None:
    run.kept = torch.autograd.grad(loss, hidden)


def by_node_hook(run: Any, hidden: torch.Tensor, loss: torch.Tensor) -> None:
    node: Any = hidden.grad_fn
    node.register_prehook(partial(setattr, run, "kept"))
    loss.backward()


@pytest.mark.parametrize("keep", [by_grad, by_node_hook])
def test_a_gradient_of_an_input_that_is_kept_is_not_overwritten(keep: Any) -> None:
    """The pass after the first that keeps one runs eagerly; replays then give copies."""

    def microbatch(run: Any, x: torch.Tensor) -> torch.Tensor:
        before, hidden = vars(run).pop("kept", [x]), x.cos() * 2
        loss = run.model[0](hidden).square().mean()
        keep(run, hidden, loss)
        return torch.as_tensor(loss.detach() + before[0].abs().sum() + run.kept[0].sum())

    def make() -> nn.ModuleList:
        return nn.ModuleList([Unit()])

    replayed = (STEPS - WARMUP) * 2 - 1
    assert_as_eager({"replayed": replayed, "eager": 1, "mismatched": 1}, make, microbatch, 2)


class Shifted(Unit):
    """Mixes each pass with the one before; returns its input as the state of the next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + self.before(state), x.view(-1).view(x.shape)


def test_an_input_that_comes_back_is_read_before_it_is_overwritten() -> None:
    states: dict[Training, torch.Tensor] = {}

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        state = states.get(run, torch.zeros(ROWS, WIDTH))
        y, states[run] = run.model[0](x.detach(), state)
        return backward(torch.as_tensor(y).square().mean())

    counts = {"replayed": (STEPS - WARMUP) * 3, "mismatched": 0}
    assert_as_eager(counts, lambda: nn.ModuleList([Shifted()]), microbatch, 3)
