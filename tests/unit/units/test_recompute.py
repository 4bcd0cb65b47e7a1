"""Activation checkpointing around a unit: refused before the capture, and run eagerly after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_cg.errors import ConfigurationError
from tests.unit.units.plain import (
    REPLAYED,
    STEPS,
    UNITS,
    Training,
    assert_as_eager,
    backward,
    refused,
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
        return backward(x.square().mean())

    return microbatch


def under_hooks(run: Training, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return train(run, x)


REFUSED = {
    around_units(
        "not reentrant"
    ): r"0, 1 was called .*torch.utils.checkpoint._checkpoint_hook\): act",
    around_units("reentrant"): "0, 1 was called inside a backward pass: activation",
    under_hooks: r"0, 1 was called under .*graph.save_on_cpu\): .* these hooks would",
}


@pytest.mark.parametrize("microbatch", REFUSED)
def test_a_unit_that_is_recomputed_is_refused(microbatch: Any) -> None:
    """One sentence for all units, which names the hooks if they are no checkpoint."""
    words = rf"1 reason:\n.*each of the units {REFUSED[microbatch]}.*\.$"
    error = refused(ConfigurationError, words, units, microbatch)
    assert [found.rule for found in error.violations] == ["unit-recomputed"] * UNITS


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_that_begins_after_the_capture_runs_eagerly(how: str) -> None:
    """Each unit runs eagerly twice then: in the forward pass, and again in the backward pass.

    A pass without gradients, as the first one of a reentrant checkpoint, is no mismatch.
    """
    mismatched = UNITS if how == "reentrant" else 2 * UNITS
    counts = {"replayed": REPLAYED - UNITS, "eager": 2 * UNITS, "mismatched": mismatched}
    assert_as_eager(counts, units, around_units(how, since=STEPS - 1))
