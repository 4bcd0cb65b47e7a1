"""Values that a unit's Python code reads: those that change after the capture are used at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from tests.unit.counted import expect

WIDTH, WARMUP, CHANGED, STEPS = 4, 2, 4, 6
LOGGER = "megatron_cg.replay.mismatch_policy"
SCALES = {"now": 1.0}
"""What the units read of this module."""


class Settings:
    """A plain object, such as a model's configuration."""

    def __init__(self) -> None:
        self.power = 1.0


class Unit(nn.Module):
    """Reads plain values from everywhere."""

    common = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings, self.skips = nn.Linear(WIDTH, WIDTH), Settings(), False
        self.factors = [1.0, 1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x if self.skips else self.linear(x)
        factor = self.settings.power * self.factors[1] * self.common * SCALES["now"]
        shift = torch.full((WIDTH,), 0.1, device=x.device) * 3  # of the default dtype
        return torch.tanh(made * factor) + shift.to(x.dtype)


Change = Callable[[Any], object]
VALUES: dict[str, tuple[Change, str]] = {
    "an attribute": (lambda unit: setattr(unit, "skips", True), "attribute skips"),
    "an attribute of an object": (
        lambda unit: setattr(unit.settings, "power", 0.5),
        "attribute settings.power",
    ),
    "an element of a list": (
        lambda unit: unit.factors.__setitem__(1, 0.5),
        "attribute factors",
    ),
    "a class attribute": (lambda _unit: setattr(Unit, "common", 0.5), "attribute Unit.common"),
    "a global": (lambda _unit: SCALES.update(now=0.5), f"global SCALES of {__name__}"),
}
SAME: dict[str, Change] = {
    "an equal number": lambda unit: setattr(unit.settings, "power", float("1.0")),
    "an equal list": lambda unit: setattr(unit, "factors", [1.0, 1.0]),
    "an equal dictionary": lambda _unit: SCALES.update(now=float("1.0")),
    "what no code reads": lambda unit: setattr(unit, "read_by_nobody", 3),
}
MODES: dict[str, Change] = {
    "determinism": lambda _unit: torch.use_deterministic_algorithms(True),
    "default dtype": lambda _unit: torch.set_default_dtype(torch.float64),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Globals and modes are as before each test."""
    yield
    restore()


def restore() -> None:
    SCALES["now"], Unit.common = 1.0, 1.0
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def train(change: Change, graphed: bool) -> tuple[list[torch.Tensor], Any]:
    """Losses, weights, counters; step ``CHANGED`` begins with a change of the first unit."""
    torch.manual_seed(0)
    network: Any = nn.Sequential(Unit(), Unit())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    found = []
    made = graph_units(network, "*", backend="tape", warmup_steps=WARMUP) if graphed else None
    with made or nullcontext():
        for step in range(STEPS):
            if step == CHANGED:
                change(network[0])
            optimizer.zero_grad()
            with made.step() if made is not None else nullcontext():
                loss = network(torch.randn(3, WIDTH, dtype=torch.float32)).sum()
                loss.backward()
                optimizer.step()
            found.append(loss.detach())
    restore()
    found += [parameter.detach().clone() for parameter in network.parameters()]
    return found, made and made.counters


def said(change: Change, replayed: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of a run that has the bits of eager training and this many replays."""
    eager, _ = train(change, graphed=False)
    with caplog.at_level(logging.WARNING, LOGGER):
        graphed, counters = train(change, graphed=True)
    assert all(torch.equal(one, two) for one, two in zip(eager, graphed, strict=True))
    passes = 2 * (STEPS - WARMUP)
    expect(counters, replayed=replayed, mismatched=passes - replayed)
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("name", VALUES)
def test_a_changed_value_is_used_at_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, what = VALUES[name]
    # Values of a class and of this file are read by both units.
    both = 2 if name in ("a class attribute", "a global") else 1
    found = said(change, 2 * (STEPS - WARMUP) - both * (STEPS - CHANGED), caplog)
    assert found and all(what in one and "(state)" in one for one in found)


@pytest.mark.parametrize("name", SAME)
def test_a_value_that_stays_the_same_is_replayed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(SAME[name], 2 * (STEPS - WARMUP), caplog) == []


@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_torch_that_changes_is_followed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = said(MODES[name], 2 * (CHANGED - WARMUP), caplog)
    assert len(found) == 2 and all(f"({name})" in one for one in found)
