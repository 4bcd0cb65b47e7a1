"""Gradients that units sum, leave out or check for NaN, and their strides; what a loop keeps."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.errors import ConfigurationError, ReplayMismatchError
from tests.unit.backends.blocks import in_backward
from tests.unit.units import plain
from tests.unit.units.plain import Training, Unit, assert_as_eager, backward, in_turn, train, units


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
        return train(run, x)

    assert_as_eager(
        {"replayed": plain.REPLAYED}, partial(units, Filling), microbatch, separate_inputs=True
    )


class Peeking(Unit):
    """Returns a view of its argument, and reads what no guard sees."""

    file: Path

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x) * float(self.file.read_text()), x[:, :1]


def test_a_verified_replay_writes_into_inputs_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs in the second microbatch, which is eager then; the first one's view was kept."""
    monkeypatch.setattr(Peeking, "file", tmp_path / "scale", raising=False)

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        Peeking.file.write_text("1" if (run.step, run.number) < (3, 1) else "0.5")
        y, first = run.model[0](x)
        return backward(y.square().mean() + first.sin().mean())

    counts = {"replayed": 3, "eager": 3}
    assert_as_eager(counts, partial(units, Peeking), microbatch, 2, units="0", verify_interval=1)


class Two(Unit):
    """The gradient of its second result is NaN, unless nobody uses that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = in_backward(x, lambda gradient: gradient.where(gradient == 0, float("nan")))
        return torch.cat([super().forward(x), second], dim=1)


@pytest.mark.parametrize("verify_interval", [0, 1])
def test_anomaly_mode_sees_no_made_up_gradients(verify_interval: int) -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        for unit in run.model:
            x = unit(x)[:, : plain.WIDTH]
        return backward(x.square().mean())

    counts = {"replayed": plain.REPLAYED, "mismatched": 0}
    with torch.autograd.set_detect_anomaly(True):
        assert_as_eager(counts, partial(units, Two), microbatch, verify_interval=verify_interval)
        assert torch.is_anomaly_enabled()


class Pair(Unit):
    """Its second output alone depends on ``second`` and on the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(plain.WIDTH, plain.WIDTH) for _ in range(2))

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
        self.layers, self.others = units(Pair), nn.Parameter(torch.randn(plain.ROWS, plain.WIDTH))


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
    counts = {"replayed": 2 * plain.REPLAYED, "mismatched": 0}
    options: dict[str, Any] = {"units": "layers.*", "verify_interval": verify_interval}
    assert_as_eager(counts, Pairs, microbatch, 2, **options)


class Skip(Unit):
    """Also returns what it goes on to use itself."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return hidden, hidden * 2 + self.linear(x)


ALL_REPLAYED = {"replayed": plain.STEPS - plain.WARMUP, "mismatched": 0}


def test_a_replay_whose_loss_is_dropped_waits_for_no_backward_pass() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        hidden, x = run.model[0](x)
        loss: torch.Tensor = x.square().mean() + hidden.sin().mean()
        return loss if run.step == plain.WARMUP else backward(loss)

    assert_as_eager(ALL_REPLAYED, partial(units, Skip, 1), microbatch)


def test_a_pass_that_ends_before_such_a_result_counts_for_no_layout() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        hidden, x = run.model[0](x)
        other = torch.ones_like(hidden, requires_grad=True)
        # Its backward pass computes both gradients, even if one is asked for.
        loss = x.square().mean() + torch.cat([hidden, other]).sum()
        torch.autograd.grad(loss, other, retain_graph=True)
        return backward(loss)

    assert_as_eager(ALL_REPLAYED, partial(units, Skip, 1), microbatch)


def test_nothing_of_a_pass_is_kept_behind_its_step() -> None:
    held: list[Any] = []

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        def act(_gradient: torch.Tensor) -> None:
            """Lives as long as autograd has its node."""

        held.append(ref(act))
        hidden, x = run.model[0](in_backward(x, act))
        return backward(x.square().mean() + hidden.sin().mean())

    def no_more(_: Training) -> None:
        assert all(one() is None for one in held)

    assert_as_eager(ALL_REPLAYED, partial(units, Skip, 1), microbatch, 1, no_more)


class Through(Unit):
    """Returns its argument as it is, and uses it once."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.linear(x)


def test_an_argument_that_is_returned_is_that_of_the_caller() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        same, made = run.model[0](x)
        assert same is x
        same.retain_grad()
        loss = same.sin().mean() + x.cos().mean() * 0.3 + same.exp().mean() + made.square().mean()
        loss.backward()
        assert x.grad is not None
        sum_of: torch.Tensor = loss + x.grad.square().sum()
        return sum_of

    counts = {"captured": 1, "replayed": plain.STEPS - plain.WARMUP}
    assert_as_eager(counts, partial(units, Through, 1), microbatch, on_failure="eager")


def test_under_torch_func_a_unit_runs_eagerly() -> None:
    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = run.model[0](x)
            return made.square().mean()

        along: Any = torch.func.jvp(loss_of, (x.detach(),), (torch.ones_like(x),))
        return backward(loss_of(x)) + torch.stack(along).sum()

    counts = {"captured": 1, "replayed": plain.STEPS - plain.WARMUP}
    assert_as_eager(counts, partial(units, Unit, 1), microbatch, on_failure="eager")


class Network(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers, self.head = units(), nn.Linear(plain.WIDTH, plain.WIDTH)
        self.layers.requires_grad_(not frozen)


def cut_off_target(run: Training, x: torch.Tensor) -> torch.Tensor:
    """The backward pass of the first pass never comes, and its output is a target."""
    target = in_turn(run.model.layers, x.detach()).detach()
    loss: torch.Tensor = (
        run.model.head(in_turn(run.model.layers, x.cos().detach())) - target
    ).sum()
    loss.square().backward()
    return loss


@pytest.mark.parametrize("frozen", [False, True])
def test_an_output_that_is_kept_is_not_overwritten(frozen: bool) -> None:
    eager = 0 if frozen else plain.REPLAYED
    counts = {"replayed": 2 * plain.REPLAYED - eager, "eager": eager, "mismatched": eager}
    assert_as_eager(counts, partial(Network, frozen), cut_off_target, units="layers.*")


def by_grad(run: Any, hidden: torch.Tensor, loss: torch.Tensor) -> None:
    run.kept = torch.autograd.grad(loss, hidden)


def by_node_hook(run: Any, hidden: torch.Tensor, loss: torch.Tensor) -> None:
    node: Any = hidden.grad_fn
    node.register_prehook(partial(setattr, run, "kept"))
    loss.backward()


@pytest.mark.parametrize("keep", [by_grad, by_node_hook])
def test_a_gradient_of_an_input_that_is_kept_is_not_overwritten(keep: Any) -> None:
    """The pass after the first that keeps one runs eagerly; replays then give copies."""

    def microbatch(run: Any, x: torch.Tensor) -> torch.Tensor:
        before, hidden = vars(run).pop("kept", [x]), x.cos() * 2
        loss = run.model[0](hidden).square().mean()
        keep(run, hidden, loss)
        return torch.as_tensor(loss.detach() + before[0].abs().sum() + run.kept[0].sum())

    make = partial(units, Unit, 1)
    replayed = (plain.STEPS - plain.WARMUP) * 2 - 1
    assert_as_eager({"replayed": replayed, "eager": 1, "mismatched": 1}, make, microbatch, 2)


class Shifted(Unit):
    """Mixes each pass with the one before; returns its input as the state of the next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(plain.WIDTH, plain.WIDTH)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + self.before(state), x.view(-1).view(x.shape)


def test_an_input_that_comes_back_is_read_before_it_is_overwritten() -> None:
    states: dict[Training, torch.Tensor] = {}

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        state = states.get(run, torch.zeros(plain.ROWS, plain.WIDTH))
        y, states[run] = run.model[0](x.detach(), state)
        return backward(torch.as_tensor(y).square().mean())

    counts = {"replayed": (plain.STEPS - plain.WARMUP) * 3, "mismatched": 0}
    assert_as_eager(counts, partial(units, Shifted, 1), microbatch, 3)


LONG, WIDE = 99, 40
"""Of a batch on which sums in another order have other bits."""
Loss = Callable[[torch.Tensor], torch.Tensor]


class Split(nn.Linear):
    """Returns halves of a transposed result, so that its argument's gradient is transposed."""

    def forward(self, x: torch.Tensor) -> Any:
        y = (x + torch.tanh(super().forward(x))).t()
        return y[:, :30], y[:, 30:]


class Behind(nn.Module):
    """Two units, behind a product whose gradient is a sum over the rows of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDE, WIDE), nn.Parameter(torch.rand(LONG, 1))
        self.units = nn.ModuleList([Split(WIDE, WIDE), nn.Linear(LONG, WIDE)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.units[1](torch.cat(self.units[0](self.inner(x) * self.scale), 1))


def train_strided(choose: Callable[[int], Loss], counts: dict[str, int]) -> None:
    def microbatch(run: Training, _x: torch.Tensor) -> torch.Tensor:
        return backward(choose(run.step)(run.model(torch.randn(LONG, WIDE))))

    assert_as_eager(counts, Behind, microbatch, units="units.*")


LOSSES: dict[str, Loss] = {
    "one number": lambda y: y.sum() * 0.01,
    "a row of numbers": lambda y: (y.sum(0) * torch.linspace(0, 1, WIDE)).sum(),
    "a column of numbers": lambda y: (y.mean(1) ** 2).sum(),
    "columns first": lambda y: (y.t() @ torch.ones(WIDE, 3)).square().mean(),
    "as the result": lambda y: y.square().mean(),
}
"""By what the gradient of the last unit's result is."""


@pytest.mark.parametrize("name", LOSSES)
def test_sums_over_gradients_have_the_bits_of_eager_training(name: str) -> None:
    train_strided(lambda _: LOSSES[name], {"replayed": plain.REPLAYED})


def test_a_gradient_with_other_strides_than_at_capture_ends_the_run() -> None:
    names = ("as the result", "one number")
    with pytest.raises(ReplayMismatchError, match=r"gradient of result 0 was strides \(40, 1\)"):
        train_strided(lambda step: LOSSES[names[step > plain.WARMUP]], {})


def test_gradients_with_various_strides_are_refused() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(y.sum() * 0.01, retain_graph=True)
        return y.square().mean()

    with pytest.raises(ConfigurationError, match=r"result 0 is strides \(0, 0\) or strides"):
        train_strided(lambda _: loss, {})


class Pictures(nn.Module):
    """Units on one picture, channels last: kernels choose a layout by the strides of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        layers = (nn.Conv2d(8, 8, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear"))
        self.units = nn.ModuleList(nn.Sequential(*layers) for _ in range(2))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> Any:
        return in_turn(self.units, self.inner(x.to(memory_format=torch.channels_last)))


PICTURES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of a result": lambda model, y: model.norm(y).square().mean() + y.mean((2, 3)).square().mean(),
    "of its gradient": lambda _, y: y.flatten(2).transpose(1, 2).softmax(-1).square().mean(),
}
"""By whose layout it is."""


@pytest.mark.parametrize("name", PICTURES)
def test_one_picture_keeps_the_layout_of_eager_training(name: str) -> None:
    def microbatch(run: Training, _x: torch.Tensor) -> torch.Tensor:
        return backward(PICTURES[name](run.model, run.model(torch.randn(1, 3, 13, 13))))

    assert_as_eager({"replayed": plain.REPLAYED}, Pictures, microbatch, units="units.*")


class Residual(nn.Linear):
    """Autograd sums its argument's gradient in place in eager training, and not in its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_strides_of_size_1_that_graphs_leave_otherwise_end_no_run() -> None:
    def microbatch(run: Training, _x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.adaptive_avg_pool2d(in_turn(run.model, torch.randn(2, 8, 1, 1)), 1)
        return backward(nn.functional.layer_norm(y.permute(0, 2, 3, 1), (8,)).pow(3).mean())

    assert_as_eager(
        {"replayed": plain.REPLAYED}, partial(units, partial(Residual, 8, 8)), microbatch
    )
