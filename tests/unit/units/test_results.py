"""What a replay returns lies in memory as after an eager pass: strides, views, buffers."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.unit.units import plain
from tests.unit.units.plain import Training, Unit, assert_as_eager, backward, in_turn, train, units


class Tower(Unit):
    """Is frozen, so a replay gives copies of what it returns."""

    bank: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("bank", "rows"):
            self.register_buffer(name, torch.zeros(plain.ROWS, plain.WIDTH))
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        kept = (y * 2).t()[1:]
        views = {"kept": kept, "part": kept[:, :2], "row": self.rows[1], "same": kept}
        out = y + self.bank.mean() + self.rows.sum()
        return y[:, 1:], y[:, :1].expand(plain.ROWS, 3), out, self.bank, views


def test_copies_have_the_strides_and_share_the_memory_of_eager_results() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        tower, head = run.model
        *made, y, bank, views = tower(x.detach())
        kept, part, row, same = views.values()
        made += [y, kept, part, row]
        bank[run.step % plain.ROWS], row[0] = y[0], run.step
        start = made[0].untyped_storage().data_ptr(), kept.untyped_storage().data_ptr()
        facts = [made[1].untyped_storage().data_ptr() == start[0], same is kept]
        facts += [part.untyped_storage().data_ptr() == start[1]]
        facts += [n for one in made for n in (*one.stride(), one.storage_offset())]
        return torch.tensor([float(backward(head(y).square().mean()).detach()), *facts])

    def make() -> nn.ModuleList:
        return nn.ModuleList([Tower(), nn.Linear(plain.WIDTH, plain.WIDTH)])

    counts = {"replayed": plain.REPLAYED // plain.UNITS, "mismatched": 0}
    assert_as_eager(counts, make, microbatch, units="0")


class Routed(Unit):
    """Its second result depends on the router's weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router: Any = nn.Linear(plain.WIDTH, plain.WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.router(x.detach())


def test_a_result_of_what_is_frozen_later_needs_no_gradient() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        y, gate = run.model[0](x)
        return backward((y * gate if gate.requires_grad else y * 2).square().mean())

    def before(run: Training) -> None:
        run.model[0].router.requires_grad_(run.step <= plain.WARMUP)

    counts = {"replayed": plain.REPLAYED // plain.UNITS, "mismatched": 0}
    assert_as_eager(counts, partial(units, Routed, 1), microbatch, 1, before)


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    attention = nn.functional.scaled_dot_product_attention
    made = attention(heads, heads, heads, mask) + attention(heads, heads, heads)
    return made.transpose(1, 2).flatten(2)


FROZEN: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "mixes rows": (5, lambda x, w: nn.functional.linear(x.mT, w).mT),
    "mixes columns": (8, lambda x, w: nn.functional.linear(x.transpose(0, 1), w).transpose(0, 1)),
    "from the left": (8, lambda x, w: (w @ x.mT).mT),
    "weights rows": (5, lambda x, w: (x.mT @ w[0]).unsqueeze(1)),
    "mask": (5, attend),
}
"""The size of a matrix, and what is computed with it."""


class Frozen(Unit):
    def __init__(self, name: str) -> None:
        super().__init__()
        size, self.computed = FROZEN[name]
        self.matrix = nn.Parameter(torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.computed(super().forward(x), self.matrix)


@pytest.mark.parametrize("name", FROZEN)
def test_what_has_another_kernel_if_it_is_frozen_later_runs_eagerly(name: str) -> None:

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        batch = torch.randn(3, 5, plain.WIDTH) + x.sum()
        return backward(in_turn(run.model, batch).square().mean())

    def before(run: Training) -> None:
        for unit in run.model:
            unit.matrix.requires_grad_(run.step != plain.STEPS - 2)

    counts = {"replayed": plain.REPLAYED - plain.UNITS, "mismatched": plain.UNITS}
    assert_as_eager(counts, partial(units, partial(Frozen, name)), microbatch, 1, before)


class Warm(Unit):
    """Reads a buffer and another tensor, and computes its matrix from two weights, twice."""

    heat: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.linear)
        self.register_buffer("heat", torch.full((plain.WIDTH,), 0.9))
        self.more = torch.full((plain.WIDTH,), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x) * self.heat) + self.more


@pytest.mark.parametrize("name", ["heat", "more", ""])
def test_other_tensors_that_are_trained_later_and_cached_weights_run_eagerly(name: str) -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        is_last = run.step == plain.STEPS - 1
        held = [getattr(unit, name).requires_grad_(is_last) for unit in run.model if name]
        with parametrize.cached() if is_last and not name else nullcontext():
            loss = train(run, x).detach()
        return torch.cat([loss.view(1), *(one.grad for one in held if is_last)])

    counts = {"replayed": plain.REPLAYED - plain.UNITS, "mismatched": plain.UNITS}
    assert_as_eager(counts, partial(units, Warm), microbatch)
