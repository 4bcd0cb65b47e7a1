"""What is refused and what is not: layouts, skipped units, autocasts; sparse and nested tensors."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron_cg.errors import CaptureError, ConfigurationError, HookError
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.units.unsharded import OtherLeaves
from tests.unit.counted import expect
from tests.unit.units import plain
from tests.unit.units.plain import Training, Unit, assert_as_eager, backward, in_turn, train, units


class Sharing(Unit):
    """Returns tensors that it also uses, as down blocks of U-Nets and layers of T5 do."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        skip, kept = self.linear(x).tanh(), x.exp()
        return (skip.sin() * kept.mean() + bias).tanh(), skip, bias, kept


def with_skips(run: Training, x: torch.Tensor) -> torch.Tensor:
    """Gradients from outside come as parts of a larger one, expanded, and from later units.

    The bias lies in memory otherwise than its gradients, and the last one gets none.
    """
    bias, skips = x.new_full((plain.WIDTH, plain.ROWS), 0.1, requires_grad=True).t() * 1, []
    for layer in run.model:
        x, skip, bias, kept = layer(x, bias)
        skips += [skip, kept]
    (torch.cat([x, *skips], 1).square().mean() + 0.1 * skips[0].sum()).backward()
    return x.sum()


class InChannels(Unit):
    """LayerScale in channels-last memory, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(plain.WIDTH, plain.WIDTH, 1)
        self.scale = nn.Parameter(torch.rand(plain.WIDTH))

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
    left = [layer for n, layer in enumerate(run.model) if n != run.step % plain.UNITS]
    for layer in left:
        x = layer(x, torch.full((plain.ROWS, plain.WIDTH), 0.5))
    return backward(x.square().mean())


class Masked(Unit):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], int, int]] = {
    "results that units use": (Sharing, with_skips, plain.REPLAYED, 0),
    "results in channels-last memory": (InChannels, on_images, plain.REPLAYED, 0),
    "passes without gradients": (Unit, with_rollouts, plain.REPLAYED, plain.REPLAYED),
    "units that steps leave out": (Masked, dropping, plain.STEPS - plain.WARMUP, 0),
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

    assert_as_eager({"replayed": plain.REPLAYED, "mismatched": 0}, make, units="*.inner")


def test_units_with_expanded_arguments_are_looked_at_as_others_are() -> None:
    """A graph takes a compact copy of such an argument; no result is taken for that copy."""

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in run.model.children():
                x = layer(x, torch.ones(1, plain.WIDTH).expand_as(x))
                x = F.linear(x, layer.linear.weight)
        return backward(x.float().square().mean())

    plain.refused(
        ConfigurationError,
        "each of the units 0 to 19: a weight that torch.autocast has cast once",
        lambda: nn.ModuleList(Masked() for _ in range(20)),
        microbatch,
    )


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


class Hooking(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).tanh()
        y.register_hook(doubled)
        return y.sin()


@pytest.mark.parametrize("name", [__name__, "profile"])
def test_a_hook_on_a_tensor_is_refused_also_in_a_file_named_as_one_of_pythons(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(name)
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(doubled, "__module__", name)
    plain.refused(CaptureError, "registers a hook on a tensor", partial(units, Hooking), train)


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


Reads = Callable[[Any, torch.Tensor, Any], Any]
"""What a unit returns, of itself, its output and its second argument."""


class Reading(Unit):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.table = nn.Embedding(plain.WIDTH, plain.WIDTH, sparse=True)
        self.reads, self.kept = reads, coo()

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return self.reads(self, super().forward(x), other)


def trained(reads: Reads, *others: Any) -> Counters:
    """Train a unit, which gets the next of ``others`` in each step, or the last one."""

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        out = run.model[0](x, others[min(run.step, len(others) - 1)])
        return backward((out[0] if isinstance(out, tuple) else out).square().mean())

    training = Training(lambda: nn.ModuleList([Reading(reads)]), microbatch)
    training.optimizer = torch.optim.SGD(training.model[0].linear.parameters())
    with training.graphs() as graphs:
        list(training.run(graphs))
        return graphs.counters


def coo() -> torch.Tensor:
    return torch.eye(plain.ROWS, plain.WIDTH).to_sparse()


NOT_DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": coo,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_an_argument_that_is_not_dense_is_refused_by_name(kind: str) -> None:
    words = rf"unit 0: argument other\[0\] is a {kind} tensor .* indices"
    with pytest.raises(ConfigurationError, match=words):
        trained(lambda unit, y, other: y, [NOT_DENSE[kind]()])


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_call_with_such_a_tensor_in_place_of_a_dense_one_runs_eagerly(kind: str) -> None:
    dense = torch.ones(1, plain.WIDTH).expand(plain.ROWS, plain.WIDTH)
    others = (dense, dense, NOT_DENSE[kind](), dense)
    replayed = plain.STEPS - plain.WARMUP - 1
    expect(trained(lambda unit, y, other: y, *others), replayed=replayed, mismatched=1)


REFUSED: dict[str, tuple[Reads, str]] = {
    "a tensor of the unit": (
        lambda unit, y, other: y * unit.kept.to_dense(),
        r"captured as forward of 0 \(Reading\).* not dense \(.*outside",
    ),
    "a tensor of the pass": (
        lambda unit, y, other: y + y.detach().to_sparse().to_dense(),
        r"^aten\._?to_sparse\S* in .*0 \(Reading\).* not dense",
    ),
    "an output": (
        lambda unit, y, other: (y, y.detach().to_sparse()),
        r"^0 \(Reading\) returned a tensor that .* dense .*Leave",
    ),
    "a gradient": (
        lambda unit, y, other: y + unit.table(other),
        r"^0 \(Reading\): the gradient of table.weight is sparse.*sparse=False",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_dense_inside_of_a_unit_is_refused(what: str) -> None:
    reads, words = REFUSED[what]
    with pytest.raises(CaptureError, match=words):
        trained(reads, torch.arange(plain.ROWS))


class Special(nn.Parameter):
    """A parameter of another class."""


class Shared(nn.Module):
    """A weight of its own under two names, which it may use in another way."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.weight = self.same = Special(torch.full((3,), 2.0))
        self.kept, self.way = [self.weight], way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "moves":
            self.weight.data = self.weight.data.clone()
        return x * (self.kept[0] if self.way == "not by attribute" else self.weight) * self.same


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("", ""),
        ("not by attribute", r"Shared\.weight is used through another reference"),
        ("moves", "Shared moves weight to other memory"),
    ],
)
def test_what_other_leaves_of_autograd_cannot_stand_for_is_refused(way: str, words: str) -> None:
    """Under DistributedDataParallel, whose accumulators stay; random units train under it."""
    model = Shared(way)
    vars(model.weight)["partition"] = "columns"
    refused = pytest.raises(CaptureError, match=words) if words else nullcontext()
    with refused, OtherLeaves([model]).held():
        leaf = model.weight
        assert leaf is model.same and leaf is not model.kept[0]
        assert type(leaf) is Special and vars(leaf)["partition"] == "columns"
        model(torch.ones(3)).sum().backward()
    assert model.weight is model.kept[0] and not model.weight._backward_hooks
    assert leaf.grad is not None or words


class Caching(Unit):
    """Reads an argument after it has written a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: torch.Tensor = nn.Buffer(torch.zeros(plain.WIDTH))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        with torch.no_grad():
            self.cache.copy_(y.mean(0))
        return y + cache


def test_an_argument_that_is_a_buffer_which_the_unit_writes_is_refused() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        for layer in run.model:
            x = layer(x, layer.cache[:])
        return backward(x.square().mean())

    words = "units 0, 1 writes a buffer of its own, which it is given as its argument cache"
    plain.refused(ConfigurationError, words, partial(units, Caching), microbatch)


class Tied(Unit):
    """Takes a parameter from outside."""

    def forward(self, x: torch.Tensor, weight: Any) -> Any:  # type: ignore[override]
        return super().forward(x) @ weight


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tied = units(Tied), nn.Parameter(torch.eye(plain.WIDTH))


def tied(run: Training, x: torch.Tensor, *, by_view: bool) -> torch.Tensor:
    weight = run.model.tied
    for layer in run.model.layers:
        x = layer(x, weight.view_as(weight) if by_view else weight)
    return backward(x.square().mean())


def test_a_parameter_that_is_given_is_refused_and_a_view_of_it_is_not() -> None:
    counts = {"replayed": plain.REPLAYED, "mismatched": 0}
    assert_as_eager(counts, Outside, partial(tied, by_view=True), units="layers.*")
    words = r"argument weight is a Parameter, .*pass a view"
    given = partial(tied, by_view=False)
    plain.refused(ConfigurationError, words, Outside, given, units="layers.*")


class Dropped(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dropout(super().forward(x))
        return y


def test_units_that_train_in_eval_mode_are_refused_and_their_dropouts_may() -> None:
    make = partial(units, Dropped)
    plain.refused(
        ConfigurationError, "call unit.train", make, train, 1, lambda run: run.model.eval()
    )

    def before(run: Training) -> None:
        for unit in run.model.eval():
            unit.train().dropout.eval()

    assert_as_eager({"replayed": plain.REPLAYED}, make, train, 1, before)
