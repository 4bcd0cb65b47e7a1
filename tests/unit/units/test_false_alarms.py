"""What is right is not refused: shared results, layouts, skipped units, several autocasts."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import HookError
from tests.unit.units.plain import (
    REPLAYED,
    ROWS,
    STEPS,
    UNITS,
    WARMUP,
    WIDTH,
    Training,
    Unit,
    assert_as_eager,
    backward,
    in_turn,
    train,
    units,
)


class Sharing(Unit):
    """Returns and sets tensors that it also uses, as down blocks of U-Nets and layers of T5 do."""

    kept: torch.Tensor

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        skip, self.kept = self.linear(x).tanh(), x.exp()
        return (skip.sin() * self.kept.mean() + bias).tanh(), skip, bias


def with_skips(run: Training, x: torch.Tensor) -> torch.Tensor:
    """Gradients from outside come as parts of a larger one, expanded, and from later units.

    The bias lies in memory otherwise than its gradients, and the last one gets none.
    """
    bias, skips = x.new_full((WIDTH, ROWS), 0.1, requires_grad=True).t() * 1, []
    for layer in run.model:
        x, skip, bias = layer(x, bias)
        skips += [skip, layer.kept]
    (torch.cat([x, *skips], 1).square().mean() + 0.1 * skips[0].sum()).backward()
    return x.sum()


class InChannels(Unit):
    """LayerScale in channels-last memory, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Conv2d(WIDTH, WIDTH, 1), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x.tanh()).mul(self.scale.reshape(1, -1, 1, 1))
        return made


def on_images(run: Training, x: torch.Tensor) -> torch.Tensor:
    images = (x[:, :, None, None] * torch.rand(9, 9)).to(memory_format=torch.channels_last)
    y = in_turn(run.model, images)
    return backward((y * y.sin()).mean())


def with_rollouts(run: Training, x: torch.Tensor) -> torch.Tensor:
    """Passes without gradients between forward and backward, in training mode."""
    y = in_turn(run.model, x)
    with torch.no_grad():
        target = in_turn(run.model, x)
    return backward((y * target).square().mean())


def dropping(run: Training, x: torch.Tensor) -> torch.Tensor:
    """LayerDrop; each mask is new, so none may be taken for one that stays."""
    left = [layer for n, layer in enumerate(run.model) if n != run.step % UNITS]
    for layer in left:
        x = layer(x, torch.full((ROWS, WIDTH), 0.5))
    return backward(x.square().mean())


class Masked(Unit):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], int, int]] = {
    "results that units use": (Sharing, with_skips, REPLAYED, 0),
    "results in channels-last memory": (InChannels, on_images, REPLAYED, 0),
    "passes without gradients": (Unit, with_rollouts, REPLAYED, REPLAYED),
    "units that steps leave out": (Masked, dropping, STEPS - WARMUP, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_are_not_refused(name: str) -> None:
    kind, microbatch, replayed, eager = CASES[name]
    counts = {"replayed": replayed, "eager": eager, "mismatched": 0}
    assert_as_eager(counts, partial(units, kind), microbatch)


class UnderItsOwn(Unit):
    """Enters autocast outside of the unit below it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.inner = dtype, Unit()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            out: torch.Tensor = self.inner(x)
        return out.float()


def test_units_may_run_under_different_autocast() -> None:
    def make() -> nn.ModuleList:
        return nn.ModuleList([UnderItsOwn(None), UnderItsOwn(torch.bfloat16)])

    assert_as_eager({"replayed": REPLAYED, "mismatched": 0}, make, units="*.inner")


def test_an_engine_that_swaps_data_in_hooks_is_refused_by_unit() -> None:
    """Weights are whole in forward and backward passes alone."""
    training = Training(units, train)
    whole = {p: p.data.clone() for p in training.model.parameters()}

    def fill(block: nn.Module, *_: Any) -> None:
        for p in block.parameters():
            p.data = whole[p].clone()

    def empty(block: nn.Module, *_: Any) -> None:
        for p in block.parameters():
            p.data = torch.empty(0)

    for block in training.model:
        empty(block)
        block.register_forward_pre_hook(fill)
        block.register_forward_hook(empty)
        block.register_full_backward_pre_hook(fill)
    words = re.escape("Weights of the units 0, 1, such as linear.weight, are elsewhere")
    with training.graphs() as graphs, pytest.raises(HookError, match=words):
        list(training.run(graphs))
