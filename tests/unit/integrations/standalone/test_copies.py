"""Copies of a network whose units are graphed, as an average of the weights makes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.counted import expect
from tests.unit.integrations.standalone.networks import BATCH, WIDTH, Run
from tests.unit.upstream.test_copies import shown, without_hooks

pytest.importorskip("megatron_fsdp")


def copied(run: Run) -> Any:
    """A copy with the weights from between steps; FSDP frees and gathers them within a step."""
    memo: dict[int, Any] = {}
    for parameter in run.network.parameters():
        between: Any = getattr(parameter, "full_tensor", lambda p=parameter: torch.zeros(p.shape))
        memo[id(parameter)] = nn.Parameter(between().clone())
    return copy.deepcopy(run.network, memo)


def averaged(run: Run) -> list[Any]:
    """Losses, and what a copy has and trains after each step, and inside one."""
    found: list[Any] = []

    def look(*_: Any) -> None:
        found.append(shown(copied(run)))

    for _ in range(4):
        handle = run.model.register_forward_hook(look)
        found.append(run.step().tolist())
        handle.remove()
        made = copied(run)
        found.append(shown(made))
        without_hooks(made)
        x = torch.ones(BATCH, WIDTH, requires_grad=True)
        out = made(x)
        out.sum().backward()
        found.append([t.tolist() for t in (out, x.grad, *(p.grad for p in made.parameters()))])
    return found


def test_an_average_of_the_weights_is_that_of_an_eager_run(one_rank: None) -> None:
    eager = averaged(Run())
    run = Run()
    with run.with_graphs() as graphs:
        assert averaged(run) == eager
        expect(graphs.counters, captured=3, replayed=9, eager=0)
