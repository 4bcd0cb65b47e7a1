"""Rows that are kept for the backward pass, in any order of passes."""

import gc
import weakref
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


class WithWeights(nn.Module):
    """Saves a result of weights with a multiple of the kept rows, as one row after the other."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.float().view(-1).exp()
        self.saved = weakref.ref(flat)
        return x.tanh() + flat.sum()


class Pass:
    """A pass with ``used`` rows, and the gradients of these that eager training has."""

    def __init__(
        self, stash: Stash, layer: Layer, used: int, experts: nn.Module | None = None
    ) -> None:
        torch.manual_seed(used)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        self._used, experts = used, experts or Experts()
        self._inputs = [x, *experts.parameters()]
        self._eager = self._gradients(experts(x))
        with stash.keeping(experts, torch.tensor([used - 2, 2]), ROWS, layer):
            self._y = experts(x)

    def _gradients(self, y: torch.Tensor) -> list[torch.Tensor]:
        rows, *weights = torch.autograd.grad(y.sum(), self._inputs)
        return [rows[: self._used], *weights]

    def is_right(self) -> bool:
        return all(map(torch.equal, self._gradients(self._y), self._eager))


@pytest.fixture
def bound() -> RowBound:
    """With room for the rows of four passes."""
    bound = RowBound(None, 4.0)
    bound.place()
    return bound


@pytest.fixture
def stash(bound: RowBound) -> Stash:
    assert bound.stash is not None
    return bound.stash


def passes(stash: Stash, *used: int) -> list[Pass]:
    layer = Layer()
    return [Pass(stash, layer, rows) for rows in used]


@pytest.mark.parametrize(
    ("order", "top"), [((2, 1, 0), 48), ((0, 2, 1), 80), ((1, 0, 2), 80)], ids=str
)
def test_room_is_free_at_once_below_the_last_pass_and_else_in_the_next_step(
    bound: RowBound, stash: Stash, order: Sequence[int], top: int
) -> None:
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
    bound: RowBound, stash: Stash
) -> None:
    made = passes(stash, 32, 31, 30, 29, 28)
    assert not bound.holds()
    excess = bound.exceeded()
    assert excess is not None and excess.rows == 160 > excess.bound == 128
    assert str(excess) == (
        "a rank had 160 rows of all MoE layers, bound 128. With --cg-moe-stash 5 or more it would "
        "have fitted."
    )
    assert [one.is_right() for one in reversed(made)] == [False, True, True, True, True]
    bound.begin_step()
    assert bound.holds() and passes(stash, 32)[0].is_right()


def test_a_pass_that_fails_or_has_no_backward_leaves_nothing_behind(
    bound: RowBound, stash: Stash
) -> None:
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


def test_each_capture_makes_its_own_memory_for_its_layers(stash: Stash) -> None:
    layers = [Layer(), Layer()]
    one = Pass(stash, layers[0], 32)
    stash.expect(layers)  # The first capture has failed.
    assert stash.rows == 128 and Pass(stash, layers[0], 31).is_right() and stash.rows == 256
    assert one.is_right()
    undo = stash.hold()
    stash.saw(layers[1], 48)
    stash.expect(layers)
    assert Pass(stash, layers[1], 30).is_right() and stash.rows == 320
    undo()


def test_graphs_have_a_buffer_of_their_own_and_a_warmup_pass_leaves_none(
    stash: Stash, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Pass(stash, Layer(), 32).is_right() and stash._of_warmup() is None
    warmup = Pass(stash, Layer(), 31)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made = passes(stash, 32, 32)
    memory = weakref.ref(stash._captured)
    undo = stash.hold()
    assert all(one.is_right() for one in [*reversed(made), warmup])
    del made
    assert memory() is not None  # No graph on a CPU holds it.
    undo()
    assert memory() is None


@pytest.mark.parametrize("shape", [(2 * ROWS,), (6, 16)])
def test_what_is_computed_of_weights_is_no_row(stash: Stash, shape: tuple[int, ...]) -> None:
    experts = WithWeights(*shape)
    assert Pass(stash, Layer(), 5, experts).is_right()
    Pass(stash, Layer(), 5, experts)  # without a backward pass
    gc.collect()
    assert experts.saved() is None
