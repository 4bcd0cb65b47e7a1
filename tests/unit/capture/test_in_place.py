"""What a unit writes, draws and reads of others: kept over a capture, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import CaptureError
from tests.unit.counted import expect

STEPS, WARMUP, WIDTH = 6, 3, 4
KEPT = ("buffer", "frozen parameter", "generator", "shared weight")
REFUSED = {
    "replaced buffer": r"replaces its buffer mean .*self\.mean\.copy_",
    "state": "writes into its argument state",
    "rows": "writes into its argument rows",
    "another's weight": r"unit uses first\.weight, a parameter of a module",
}


class Unit(nn.Module):
    """Does what its name says; a number that becomes a tensor in the pass is no state."""

    def __init__(self, name: str, other: nn.Linear) -> None:
        super().__init__()
        self.name, self.linear, self.other = name, nn.Linear(WIDTH, WIDTH), [other]
        self.mean: torch.Tensor
        if name == "frozen parameter":
            self.register_parameter("mean", nn.Parameter(torch.zeros(WIDTH), requires_grad=False))
        else:
            self.register_buffer("mean", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(3)
        if name == "shared weight":
            self.shared = other.weight

    def forward(self, rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if self.name == "rows":
            rows.mul_(0.5)
        made: torch.Tensor = self.linear(rows) * torch.tensor(0.5) + self.mean + state
        new = 0.9 * self.mean + 0.1 * (rows.detach().mean(0) + 1)
        if self.name in ("buffer", "frozen parameter"):
            self.mean.data.copy_(new)
        elif self.name == "replaced buffer":
            self.mean = new
        elif self.name == "generator":
            made = made * torch.rand(WIDTH, generator=self.generator, device=rows.device)
        elif self.name in ("shared weight", "another's weight"):
            made = made * self.other[0].weight.sum()
        elif self.name == "state":
            state.mul_(0.9).add_(rows.detach().mean(0))
        return made


class Network(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.state = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)
        self.unit = Unit(name, self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        return self.unit(rows.detach() if self.unit.name == "rows" else rows, self.state)  # type: ignore[no-any-return]


def train(name: str, captured: int = 1, **options: Any) -> list[torch.Tensor]:
    """Losses and what the unit has in the end, with graphs if there are ``options``."""
    network = Network(name)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    graphs: Any = None
    if options:
        graphs = graph_units(network, ["unit"], backend="tape", warmup_steps=WARMUP, **options)
    losses = []
    with graphs or nullcontext():
        for step in range(STEPS):
            with graphs.step() if graphs else nullcontext():
                optimizer.zero_grad()
                loss = network(torch.arange(2.0 * WIDTH).view(2, WIDTH).add(step).sin()).sum()
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
        if graphs:
            replayed = captured * (STEPS - WARMUP)
            expect(graphs.counters, captured=captured, replayed=replayed, mismatched=0)
    assert not any(parameter._backward_hooks for parameter in network.parameters())
    return [*losses, *network.state_dict().values()]


@pytest.mark.parametrize("interval", [0, 1], ids=["", "verified"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_unit_changes_is_as_before_the_capture(name: str, interval: int) -> None:
    torch.use_deterministic_algorithms(True)
    found = train(name, verify_interval=interval)
    assert all(map(torch.equal, train(name), found))
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_keep_is_refused_and_as_before(name: str) -> None:
    with pytest.raises(CaptureError, match=REFUSED[name]):
        train(name, on_failure="error")
    found = train(name, captured=0, on_failure="eager")
    assert all(map(torch.equal, train(name), found))
