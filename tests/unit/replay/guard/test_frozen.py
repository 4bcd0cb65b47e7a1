"""A parameter that was frozen at capture and is trained later gets its gradient."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.replay.counters import Counters
from tests.unit.counted import expect

STEPS, CAPTURED, CHANGED = 5, 1, 3


def train(*, graphed: bool, needed: bool) -> tuple[list[torch.Tensor], Counters]:
    """The weights after training; from one step on, the inner weight needs a gradient or none."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    weight = model.get_submodule("1.0").get_parameter("weight").requires_grad_(not needed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = (
        graph_units(model, ["0", "1"], warmup_steps=CAPTURED, backend="tape") if graphed else None
    )
    with graphs or nullcontext():
        for step in range(STEPS):
            if step == CHANGED:
                weight.requires_grad_(needed)
            with graphs.step() if graphs is not None else nullcontext():
                optimizer.zero_grad()
                model(torch.full((3, 4), float(step)).sin()).square().sum().backward()
                optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, graphs.counters if graphs is not None else Counters()


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


def test_a_parameter_that_is_unfrozen_gets_its_gradient(caplog: pytest.LogCaptureFixture) -> None:
    eager, _ = train(graphed=False, needed=True)
    graphed, counters = train(graphed=True, needed=True)
    assert same(eager, graphed)
    late = STEPS - CHANGED
    expect(counters, mismatched=late, eager=late, replayed=2 * (CHANGED - CAPTURED) + late)
    text = "parameter 0.weight was without requires_grad at capture and is with it now (frozen)"
    assert text in caplog.text


def test_a_parameter_that_is_frozen_later_is_replayed() -> None:
    eager, _ = train(graphed=False, needed=False)
    graphed, counters = train(graphed=True, needed=False)
    assert same(eager, graphed)
    expect(counters, mismatched=0, replayed=2 * (STEPS - CAPTURED))
