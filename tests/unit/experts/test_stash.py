"""Rows that are kept for the backward pass, in any order of passes."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from torch import nn

from megatron_cg.experts.row_bound import RowBound
from megatron_cg.experts.stash import Stash

pytestmark = pytest.mark.usefixtures("one_rank")
ROWS, WIDTH = 32, 3


class Layer:
    """What a stash needs of a dispatcher."""

    average, ep_group = ROWS, None


class Experts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().exp()


class Pass:
    """A pass with ``used`` rows, and the gradients of these that eager training has."""

    def __init__(self, stash: Stash, layer: Layer, used: int) -> None:
        torch.manual_seed(used)
        self.x = torch.randn(ROWS, WIDTH, requires_grad=True)
        self._used, experts = used, Experts()
        self._eager = torch.autograd.grad(experts(self.x).sum(), self.x)[0]
        with stash.keeping(experts, torch.tensor([used - 2, 2]), ROWS, layer):
            self._y = experts(self.x)

    def is_right(self) -> bool:
        found = torch.autograd.grad(self._y.sum(), self.x)[0]
        return torch.equal(found[: self._used], self._eager[: self._used])


@pytest.fixture
def bound() -> RowBound:
    """With room for the rows of four passes."""
    bound = RowBound(None, 4.0)
    bound.place()
    return bound


def stash_of(bound: RowBound) -> Stash:
    assert bound.stash is not None
    return bound.stash


def passes(stash: Stash, *used: int) -> list[Pass]:
    layer = Layer()
    return [Pass(stash, layer, rows) for rows in used]


@pytest.mark.parametrize(
    ("order", "top"), [((2, 1, 0), 48), ((0, 2, 1), 80), ((1, 0, 2), 80)], ids=str
)
def test_room_is_free_at_once_below_the_last_pass_and_else_in_the_next_step(
    bound: RowBound, order: Sequence[int], top: int
) -> None:
    stash = stash_of(bound)
    made = passes(stash, 16, 32, 20)
    assert int(stash._top) == 80
    assert made[order[0]].is_right() and int(stash._top) == top
    (later,) = passes(stash, 10)
    for number in order[1:]:
        assert made[number].is_right() and int(stash._top) == top + 16
    assert later.is_right() and int(stash._top) == top
    bound.begin_step()
    assert bound.holds() and not stash._top


def test_a_pass_beyond_the_buffer_overwrites_none_and_the_next_step_forgets_it(
    bound: RowBound,
) -> None:
    stash = stash_of(bound)
    made = passes(stash, 32, 31, 30, 29, 28)
    assert not bound.holds()
    excess = bound.exceeded()
    assert excess is not None and excess.rows == 160 > excess.bound == 128
    assert excess.flag == "--cg-moe-stash" and excess.enough == 5.0
    assert [one.is_right() for one in reversed(made)] == [False, True, True, True, True]
    bound.begin_step()
    assert bound.holds() and passes(stash, 32)[0].is_right()


def test_a_pass_that_fails_or_has_no_backward_leaves_nothing_behind(bound: RowBound) -> None:
    stash = stash_of(bound)
    made, layer = passes(stash, 32, 32), Layer()
    with suppress(ZeroDivisionError), stash.keeping(Experts(), torch.tensor([32]), ROWS, layer):
        torch.randn(ROWS, WIDTH, requires_grad=True).exp()
        raise ZeroDivisionError
    assert int(stash._top) == 64 and made[1].is_right()
    assert not torch._C._autograd._top_saved_tensors_default_hooks(False)
    del made  # The first pass has no backward pass.
    bound.begin_step()
    later = passes(stash, 32, 31, 30, 29)
    assert bound.holds() and all(one.is_right() for one in reversed(later))
