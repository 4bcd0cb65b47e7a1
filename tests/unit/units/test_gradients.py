"""Gradients that units sum, leave out, check for NaN, or that are differentiated again."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from megatron_cg.errors import CaptureError, ConfigurationError, ReplayMismatchError
from megatron_cg.units.call import separate
from megatron_cg.upstream.patch import combine_undos
from tests.unit.counted import expect
from tests.unit.ranks import on_ranks
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
    refused,
    same,
    train,
    units,
)


def used_later(run: Training, x: torch.Tensor) -> torch.Tensor:
    """Each unit's input has one more use after it."""
    for layer in run.model:
        x = layer(x) + x.sin() * 3
    return backward(x.square().mean())


def test_an_input_that_is_used_twice_inside_and_later_outside_is_refused() -> None:
    """Autograd adds three gradients in another order. All such units are named at once."""
    said = "x, used 2 times inside and 1 times later outside"
    error = refused(ConfigurationError, said, units, used_later)
    named = [(one.rule, one.found) for one in error.violations]
    assert named == [("unit-shared-gradients", f"unit {n}: {said}") for n in range(UNITS)]
    assert all("pass separate_inputs=True to graph_units" in one.remedy for one in error.violations)


class Fed(Unit):
    """Gets its input four times."""

    def forward(self, x: torch.Tensor, others: Any) -> torch.Tensor:  # type: ignore[override]
        (first, second), named = others[0], others[1]["named"]
        made: torch.Tensor = super().forward(first) * second + named.sin() + x.cos()
        return made


def fed(run: Training, x: torch.Tensor) -> torch.Tensor:
    """The containers stay the loop's own."""
    for layer in run.model:
        x = x * 1
        others: list[Any] = [(x, x), {"named": x}]
        y = layer(x, others=others)
        assert others[0][0] is x and others[1]["named"] is x
        x = y + x.sin() * 3
    return backward(x.square().mean())


@pytest.mark.parametrize(("kind", "microbatch"), [(Unit, used_later), (Fed, fed)])
def test_separate_inputs_equal_eager_training_with_views(kind: Any, microbatch: Any) -> None:
    of_training = (partial(units, kind), microbatch)
    counts = {"replayed": REPLAYED, "mismatched": 0}
    assert_as_eager(counts, *of_training, separate_inputs=True)
    assert_as_eager(counts, *of_training, separate_inputs=True, verify_interval=1)
    # Without views numbers are others, so that the option has to be asked for.
    plain, viewed = Training(*of_training), Training(*of_training)
    undo = combine_undos(map(separate, viewed.model))
    assert not same(plain.run(), viewed.run())
    undo()
    assert not any("forward" in vars(unit) for unit in viewed.model)


def test_eager_passes_after_a_mismatch_keep_inputs_separate() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        rows = x[:-1] if run.step == STEPS - 1 else x
        return used_later(run, rows)

    counts = {"replayed": REPLAYED - UNITS, "eager": UNITS, "mismatched": UNITS}
    assert_as_eager(counts, units, microbatch, separate_inputs=True)


class Filling(Unit):
    """Fills a list, as generation fills a cache."""

    def forward(self, x: torch.Tensor, filled: list[Any] | None = None) -> torch.Tensor:
        if filled is not None:
            filled.append(x)
        return super().forward(x)


def test_a_pass_without_gradients_may_fill_a_list() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        filled: list[Any] = []
        with torch.no_grad():
            run.model[0](x, filled)
        assert len(filled) == 1
        return used_later(run, x)

    assert_as_eager(
        {"replayed": REPLAYED}, partial(units, Filling), microbatch, separate_inputs=True
    )


def test_a_verified_step_keeps_inputs_separate() -> None:
    """The loop after ``close()`` does not."""

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        return used_later(run, x.detach().requires_grad_())

    eager, graphed = Training(units, microbatch), Training(units, microbatch)
    undo = combine_undos(map(separate, eager.model))
    expected = list(eager.run())
    undo()
    with graphed.graphs(separate_inputs=True, verify_steps=1) as graphs:
        graphed.microbatch = lambda *of: graphs.verified(partial(microbatch, *of))
        assert same(expected, list(graphed.run(graphs)))
        expect(graphs.counters, steps_verified=STEPS - WARMUP, steps_differed=0)
    graphed.microbatch = microbatch
    assert same(eager.run(), graphed.run())


def test_separate_inputs_leave_weights_to_the_unit() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        loss = in_turn(run.model, x).square().mean()
        return backward(loss + sum(layer.linear.weight.sin().sum() for layer in run.model))

    said = (
        r"a parameter of shape \(8, 8\), used 2 times inside and 1 times later outside.*w.view_as"
    )
    training = Training(partial(units, Twice), microbatch)
    graphs = training.graphs(separate_inputs=True)
    with graphs, pytest.raises(ConfigurationError, match=said):
        list(training.run(graphs))


class Twice(Unit):
    """Uses its input twice, and its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


USES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "its input": (lambda _, x: x.sin(), "x"),
    "its weight": (lambda layer, _: layer.linear.weight.sin(), "a parameter of shape (8, 8)"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_use_that_comes_after_the_capture_is_an_error_if_sums_round_otherwise(
    name: str, after: bool
) -> None:
    use, named = USES[name]

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        hidden, is_last, layer = x * 2, run.step == STEPS - 1, run.model[0]
        term = use(layer, hidden).sum() if is_last and not after else 0.0
        loss = layer(hidden).square().mean() + term
        return backward(loss + use(layer, hidden).sum() if is_last and after else loss)

    def make() -> nn.ModuleList:
        return nn.ModuleList([Twice()])

    if not after:
        replayed = (STEPS - WARMUP) * 2
        assert_as_eager({"replayed": replayed, "mismatched": 0}, make, microbatch, 2)
        return
    said = re.escape(f"{named}, used several times inside and 1 times later outside now (sharing)")
    refused(ReplayMismatchError, f"^0.*{said}", make, microbatch, 2)


class Recomputed(Unit):
    """Uses a weight inside of a reentrant checkpoint and outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return inner @ self.linear.weight


class Differentiated(Unit):
    """Runs a backward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.detach().requires_grad_()
        super().forward(inner).sum().backward()
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Recomputed, "adds to the gradient of linear.weight in 2 backward passes"),
        (Differentiated, "runs a backward pass in its forward pass"),
    ],
)
def test_a_backward_pass_inside_of_another_pass_is_refused(kind: type[Unit], said: str) -> None:
    refused(CaptureError, f"^0.* {said}", lambda: nn.ModuleList([kind()]))


class _NanUnlessZero(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.where(gradient == 0, float("nan"))


class Two(Unit):
    """The gradient of its second result is NaN, unless nobody uses that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = _NanUnlessZero.apply(x)  # type: ignore[no-untyped-call]
        return torch.cat([super().forward(x), dropped], dim=1)


class Masking(nn.Module):
    """Drops the second result of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.unit(x)[:, :WIDTH]
        return kept


@pytest.mark.parametrize("verify_interval", [0, 1])
def test_anomaly_mode_sees_no_made_up_gradients(verify_interval: int) -> None:
    counts = {"replayed": REPLAYED, "mismatched": 0}
    with torch.autograd.set_detect_anomaly(True):
        of_training = (partial(units, Masking), train)
        assert_as_eager(counts, *of_training, units="*.unit", verify_interval=verify_interval)
        assert torch.is_anomaly_enabled()


def test_anomaly_mode_names_a_replay_that_returns_nan() -> None:
    def poisoned(run: Training, x: torch.Tensor) -> torch.Tensor:
        in_turn(run.model, x).square().mean().mul(float("nan")).backward()
        raise AssertionError("not reached")

    training = Training()
    with training.graphs() as graphs:
        list(training.run(graphs))
        training.microbatch = poisoned
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            list(training.run(graphs))


def twice(run: Training, x: torch.Tensor) -> torch.Tensor:
    """Its units have two backward passes."""
    y = in_turn(run.model, x)
    y.square().sum().backward(retain_graph=True)
    return train_on(y)


def penalty(run: Training, x: torch.Tensor) -> torch.Tensor:
    """The incoming gradient of the last unit needs none itself."""
    (gradient,) = torch.autograd.grad(in_turn(run.model, x).sum(), x, create_graph=True)
    return train_on(gradient)


def of_weights_behind(run: Training, x: torch.Tensor) -> torch.Tensor:
    """The graph is kept, but the units have one backward pass."""
    y = in_turn(run.model, x)
    torch.autograd.grad(y.sum(), y, retain_graph=True)
    return train_on(y)


def train_on(y: torch.Tensor) -> torch.Tensor:
    return backward(y.square().sum())


REFUSED = {twice: r"twice .*\(retain_graph=True\)", penalty: "with create_graph=True"}


@pytest.mark.parametrize("microbatch", REFUSED)
@pytest.mark.parametrize("since", [0, 3])
def test_a_second_backward_pass_names_the_unit_and_what_to_do(microbatch: Any, since: int) -> None:
    """Before the capture if it is seen there."""
    late = r"^[01]: .*(create|retain)_graph.* Leave the unit out of graph_units\.$"
    early = rf"the backward pass of each of the units 0, 1 runs {REFUSED[microbatch]}"
    error, words = (ReplayMismatchError, late) if since else (ConfigurationError, early)
    refused(error, words, units, lambda *of: (microbatch if of[0].step >= since else train)(*of))


def test_a_graph_of_autograd_may_be_kept() -> None:
    assert_as_eager({"replayed": REPLAYED, "mismatched": 0}, units, of_weights_behind)


class Meaned(Unit):
    """Uses its first result itself."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        made = super().forward(x)
        return made, made.mean()


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "grad": lambda loss, made: torch.autograd.grad(loss, made, retain_graph=True),
    "hook": lambda _loss, made: made.register_hook(torch.sin),
    "retain": lambda _loss, made: made.retain_grad(),
}


@pytest.mark.parametrize(("how", "since"), [("grad", 0), ("hook", 0), ("retain", 0), ("grad", 3)])
def test_the_gradient_of_a_result_that_its_unit_uses_is_refused(how: str, since: int) -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        made, mean = run.model[0](x)
        loss = (made * mean).square().mean()
        _ = READS[how](loss, made) if run.step >= since else None
        return backward(loss)

    error = ReplayMismatchError if since else ConfigurationError
    said = "a result that it also uses itself"
    refused(error, said, partial(units, Meaned), microbatch, units="0")


class Pooled(nn.Module):
    """Returns what its unit does, so that FSDP2 has hooks on that."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Meaned()
        fully_shard(self.unit)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.unit(x)


def train_pooled() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        made, mean = run.model(x)
        return backward((made * mean).square().mean())

    counts = {"replayed": STEPS - WARMUP, "mismatched": 0}
    assert_as_eager(counts, Pooled, microbatch, units="unit")


def test_hooks_of_fsdp2_on_such_a_result_read_no_gradient() -> None:
    on_ranks(train_pooled, 1)


class Pair(Unit):
    """Its second output alone depends on ``second`` and on the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Autograd's graph does not show which parameters this uses.
        inner: Any = checkpoint(self.linear, x, use_reentrant=True)
        return x + self.first(inner), self.second(inner * other)


class Pairs(nn.Module):
    """Two such units, whose second input is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.others = units(Pair), nn.Parameter(torch.randn(ROWS, WIDTH))


UNUSED = {"never": (), "in a step before capture": (0,), "in some replays": (2, 4)}
"""In which steps the loss uses the second outputs: one of two microbatches."""


@pytest.mark.parametrize("verify_interval", [0, 1])
@pytest.mark.parametrize("uses", UNUSED)
def test_what_only_an_unused_output_needs_gets_no_gradient(uses: str, verify_interval: int) -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        y, others, more = x * 1, run.model.others * 1, []
        for layer in run.model.layers:
            y, second = layer(y, others)
            more.append(second)
        loss = y.square().mean()
        if run.step in UNUSED[uses] and run.number == 1:
            loss = loss + torch.stack(more).mean()
        loss.backward()
        return loss

    assert any(one is None for one in Training(Pairs, microbatch, 2).run())
    counts = {"replayed": 2 * REPLAYED, "mismatched": 0}
    options: dict[str, Any] = {"units": "layers.*", "verify_interval": verify_interval}
    assert_as_eager(counts, Pairs, microbatch, 2, **options)
