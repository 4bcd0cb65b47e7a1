"""Units under autocast: a pass is captured under the one around it in eager training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import ReplayMismatchError
from tests.unit.counted import expect
from tests.unit.units.plain import (
    REPLAYED,
    STEPS,
    UNITS,
    WARMUP,
    Training,
    Unit,
    assert_as_eager,
    in_turn,
    same,
    units,
)

PLACES = ("both passes", "forward", "backward")
"""Where a training loop enters autocast."""


def autocast(
    dtype: torch.dtype | None = torch.bfloat16, **options: Any
) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, enabled=dtype is not None, **options)


class Island(Unit):
    """A router in float32, as mixtures of experts have one; its two results are reached apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(None):
            scores = torch.tanh(self.linear(x.float()))
        out: torch.Tensor = x + scores * self.linear(x)
        return out


def under(place: str, cache: bool = True) -> Callable[[Training, torch.Tensor], torch.Tensor]:
    """A microbatch with autocast in that place."""

    def at(here: str) -> AbstractContextManager[Any]:
        return autocast(cache_enabled=cache) if here == place else nullcontext()

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        with at("both passes"):
            with at("forward"):
                y = in_turn(run.model, x)
            loss = y.float().square().mean()
            with at("backward"):
                loss.backward()
        return loss

    return microbatch


@pytest.mark.parametrize("verify_interval", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Unit, Island])
def test_a_pass_is_captured_under_its_own_autocast(
    kind: type[Unit], place: str, verify_interval: int
) -> None:
    counts = {"replayed": REPLAYED, "mismatched": 0}
    of_training = (partial(units, kind), under(place))
    assert_as_eager(counts, *of_training, verify_interval=verify_interval)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_in_another_precision_is_no_step_of_these_graphs(place: str) -> None:
    """An eager pass follows a forward pass in another precision; none can follow a replay."""
    eager, graphed = (Training(partial(units, Island), under("")) for _ in range(2))
    with graphed.graphs() as graphs:
        assert same(list(eager.run()), list(graphed.run(graphs)))
        eager.microbatch = graphed.microbatch = under(place)
        if place == "backward":
            with pytest.raises(ReplayMismatchError, match="cpu in the backward pass was off"):
                list(graphed.run(graphs))
            return
        assert same(list(eager.run()), list(graphed.run(graphs)))
        expect(graphs.counters, mismatched=STEPS * UNITS)


def test_a_step_without_the_cache_of_casts_runs_eagerly() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        return under("forward", cache=run.step < STEPS - 1)(run, x)

    assert_as_eager({"replayed": REPLAYED - UNITS, "mismatched": UNITS}, units, microbatch)


class UnderItsOwn(Unit):
    """Enters autocast outside of the unit below it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.inner = dtype, Island()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.dtype):
            out: torch.Tensor = self.inner(x)
        return out.float()


def test_units_may_run_under_different_autocast() -> None:
    def make() -> nn.ModuleList:
        return nn.ModuleList([UnderItsOwn(None), UnderItsOwn(torch.bfloat16)])

    assert_as_eager({"replayed": REPLAYED, "mismatched": 0}, make, under(""), units="*.inner")


def sharing(twice: bool) -> nn.ModuleList:
    """Two units with one weight, or one unit that is called twice."""
    first, second = Unit(), Unit()
    second.linear.weight = first.linear.weight
    return nn.ModuleList([first, first if twice else second])


@pytest.mark.parametrize("place", ["", "forward"])
@pytest.mark.parametrize("twice", [False, True])
def test_weights_may_be_shared_without_shared_casts(twice: bool, place: str) -> None:
    calls = (STEPS - WARMUP) * 2
    counts = {"eager": calls // 2 if twice else 0, "replayed": calls // 2 if twice else calls}
    assert_as_eager(counts, partial(sharing, twice), under(place, cache=False))
