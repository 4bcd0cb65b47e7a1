"""Activation checkpointing around a unit: refused before the capture, and run eagerly after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_cg.errors import ConfigurationError
from tests.unit.integrations.standalone.plain import (
    REPLAYED,
    STEPS,
    UNITS,
    Training,
    assert_as_eager,
    train,
    units,
)

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "not reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
}


def around_units(how: str, since: int = 0) -> Callable[[Training, torch.Tensor], torch.Tensor]:
    """A microbatch in which a checkpoint is around each unit and what surrounds it."""

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        for layer in run.model:

            def around(y: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                return torch.sin(layer(torch.tanh(y)))

            x = CHECKPOINTS[how](around, x) if run.step >= since else around(x)
        loss = x.square().mean()
        loss.backward()
        return loss

    return microbatch


def under_hooks(run: Training, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return train(run, x)


@pytest.mark.parametrize("microbatch", [*map(around_units, CHECKPOINTS), under_hooks])
def test_a_unit_that_is_recomputed_is_refused(microbatch: Any) -> None:
    training = Training(units, microbatch)
    with training.graphs() as graphs, pytest.raises(ConfigurationError) as error:
        list(training.run(graphs))
    assert [found.rule for found in error.value.violations] == ["unit-recomputed"] * UNITS


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_that_begins_after_the_capture_runs_eagerly(how: str) -> None:
    """Each unit runs eagerly twice then: in the forward pass, and again in the backward pass."""
    counts = {"replayed": REPLAYED - UNITS, "eager": 2 * UNITS, "mismatched": 2 * UNITS}
    assert_as_eager(counts, units, around_units(how, since=STEPS - 1))
