"""Weights that autograd does not see, and those that it must."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.accumulators import forget_accumulators
from megatron_cg.cpu.launch import run_processes
from megatron_cg.errors import FastPathError, UpstreamChangedError
from megatron_cg.fsdp.fast.hidden import HiddenWeights, hide_in

pytest.importorskip("megatron_fsdp")

PARTS, WIDTH, STEPS = 6, 4, 3


class _Grouped(torch.autograd.Function):
    """Rows in equal shares, each share times a weight of its own; one node for all weights."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        context.save_for_backward(rows, *weights)
        shares = zip(rows.chunk(len(weights)), weights, strict=True)
        return torch.cat([share @ weight.t() for share, weight in shares]), None

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, _other: None) -> Any:
        rows, *weights = context.saved_tensors
        shares = gradient.chunk(len(weights))
        back = torch.cat([g @ weight for g, weight in zip(shares, weights, strict=True)])
        into = rows.chunk(len(weights))
        return (back, *[g.t() @ share for g, share in zip(shares, into, strict=True)])


class Grouped(nn.Module):
    """Some experts, as a grouped GEMM has them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARTS):
            weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        apply: Callable[..., Any] = _Grouped.apply
        output, nothing = apply(rows, *self._parameters.values())
        return output, nothing


class Layer(nn.Module):
    """An FSDP unit: a dense part and experts; ``way`` says how the experts are called."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.dense, self.grouped, self.way = nn.Linear(WIDTH, WIDTH), Grouped(), way

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.dense(rows).tanh()
        if self.way == "recompute":
            output: torch.Tensor = checkpoint(
                lambda x: self.grouped(x)[0], rows, use_reentrant=True
            )
            return output
        penalty: torch.Tensor | float = 0.0
        if self.way in ("used before", "renewed"):
            for weight in list(self.grouped.parameters())[1::2]:
                penalty = penalty + weight.square().sum() * 1e-2
        if self.way == "twice":
            rows = self.grouped(rows)[0].tanh()
        output = self.grouped(rows)[0]
        if self.way == "used beside":
            # As a penalty on weights is: a second use, and other gradients, of some of them.
            for weight in list(self.grouped.parameters())[1::2]:
                output = output + (weight.square().sum() * 1e-2)
        return output + penalty


WAYS = {
    "once": 2 * STEPS * 2,
    "recompute": 2 * STEPS * 2,
    # Handed over once, as the sum of both.
    "twice": 2 * STEPS * 2,
    "used beside": 2 * STEPS * 2,
    "used before": 2 * STEPS * 2,
    "graphed": 0,
    "hooked": 0,
}
"""Passes of the experts whose gradients are handed over together."""


def fit(way: str, fast: bool) -> dict[str, Any]:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_cg.fsdp import fast as fast_path
    from megatron_cg.fsdp.fast.gradients import GradientHandOff

    torch.manual_seed(0)
    taken: list[int] = []
    model: Any = fully_shard_model(
        nn.Sequential(Layer(way), Layer(way), nn.Linear(WIDTH, 1)),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        calculate_per_token_loss=True,
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
    )
    if way == "hooked":
        for parameter in model.param_and_grad_buffer.params:
            parameter.register_hook(lambda gradient: gradient * 2)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.003))
    function, place = _Grouped, sys.modules[Grouped.__module__]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        taking = counted(GradientHandOff.take_hidden, taken)
        patch.setattr(GradientHandOff, "take_hidden", taking)
        losses = []
        for step in range(STEPS + 1):
            if fast and step == 1:
                path = fast_path.install(model)
                undo.callback(path.close)
                assert path.hand_off is not None and "gradients" in path.parts
                graphed = set(model.modules()) if way == "graphed" else set()
                hidden = HiddenWeights(model.module, path.hand_off, graphed)
                undo.callback(hide_in(place, "_Grouped", hidden))
                assert _Grouped is not function
            optimizer.zero_grad()
            if fast and step == 2 and way == "renewed":
                raw: Any = SimpleNamespace(parameters=lambda: model.param_and_grad_buffer.params)
                forget_accumulators([raw])
                with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
                    one_step(model, step)
                break
            losses += one_step(model, step)
            optimizer.step()
    assert _Grouped is function
    return {"losses": losses, "taken": taken}


def counted(take: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    def counting(hand_off: Any, weights: Any, *rest: Any) -> None:
        taken.append(len(weights.weights))
        take(hand_off, weights, *rest)

    return counting


def one_step(model: Any, step: int) -> list[float]:
    """Two microbatches; their losses."""
    rows = torch.arange(2.0 * PARTS * WIDTH).reshape(2 * PARTS, WIDTH)
    found = [(rows * (1 + number) + dist.get_rank() + step).sin() for number in range(2)]
    losses = []
    for x in found:
        losses.append(model(x.requires_grad_()).square().sum())
        losses[-1].backward()
    return [loss.item() for loss in losses]


def fit_all(folder: Path) -> None:
    for way in WAYS:
        runs = {name: fit(way, name == "fast") for name in ("eager", "fast")}
        (folder / f"{way}-{dist.get_rank()}.json").write_text(json.dumps(runs))
    fit("renewed", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hidden")
    run_processes(partial(fit_all, found))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_megatron_fsdp_alone(folder: Path, way: str) -> None:
    for rank in range(2):
        runs = json.loads((folder / f"{way}-{rank}.json").read_text())
        assert runs["fast"]["losses"] == runs["eager"]["losses"]
        assert runs["fast"]["losses"][-1] < runs["fast"]["losses"][0]
        assert runs["eager"]["taken"] == []
        assert runs["fast"]["taken"] == [PARTS] * WAYS[way]


class HandOff:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[tuple[list[torch.Tensor], list[bool]]] = []
        self.hidden: list[Any] = []

    def knows(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter)

    def hide(self, weights: list[Any], _to_come: Any) -> list[Any]:
        self.hidden += weights
        return weights

    def show(self, weights: list[Any]) -> None:
        del self.hidden[-len(weights) :]

    def take_hidden(self, _together: Any, gradients: list[torch.Tensor], used: list[bool]) -> None:
        self.taken.append((gradients, used))


def rows() -> torch.Tensor:
    return torch.arange(float(PARTS * WIDTH)).reshape(PARTS, WIDTH).sin().requires_grad_()


@pytest.fixture
def module() -> Grouped:
    torch.manual_seed(0)
    found = Grouped()
    for weight in found.parameters():
        # In the place of Megatron-FSDP's own.
        weight.register_post_accumulate_grad_hook(lambda _: None)
    return found


@pytest.fixture
def hand_off() -> HandOff:
    return HandOff()


@pytest.fixture
def hide(hand_off: HandOff) -> Iterator[Callable[[nn.Module], Callable[[], None]]]:
    """Hides a module's weights; undone at the test's end."""
    undo = ExitStack()

    def hiding(module: nn.Module) -> Callable[[], None]:
        hidden = HiddenWeights(nn.Sequential(module), hand_off)  # type: ignore[arg-type]
        undo.callback(hide_in(sys.modules[__name__], "_Grouped", hidden))
        return undo.close

    yield hiding
    undo.close()


Hide = Callable[[nn.Module], Callable[[], None]]


def test_each_backward_pass_is_handed_over_and_none_after_the_undo(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    undo = hide(module)
    weights = list(module.parameters())
    # Two microbatches on their way at once, as in a pipeline.
    first, second = module(rows())[0].sum(), module(rows())[0].sum()
    first.backward()
    assert len(hand_off.taken) == 1
    second.backward()
    assert len(hand_off.taken) == 2 and all(weight.grad is None for weight in weights)
    assert len(hand_off.hidden) == PARTS
    with torch.no_grad():
        module(rows())
    undo()
    assert hand_off.hidden == [] and isinstance(_Grouped, type)
    module(rows())[0].sum().backward()
    assert len(hand_off.taken) == 2 and weights[0].grad is not None


def test_a_pass_that_names_its_inputs_is_refused(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    hide(module)
    given, weights = rows(), list(module.parameters())
    for named in ([given], [given, weights[0]]):
        with pytest.raises(FastPathError, match="names its inputs"):
            module(given)[0].sum().backward(inputs=named)
        with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
            torch.autograd.grad(module(given)[0].sum(), named, allow_unused=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(module(given)[0].sum(), weights[:1])
    assert hand_off.taken == [] and all(weight.grad is None for weight in weights)


def test_what_is_handed_over_are_the_gradients_in_the_weights_order(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    module(rows())[0].square().sum().backward()
    expected = [weight.grad for weight in module.parameters()]
    hide(module)
    given = rows()
    module(given)[0].square().sum().backward()
    assert given.grad is not None
    ((found, used),) = hand_off.taken
    assert used == [False] * PARTS
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and torch.equal(ours, theirs)


def test_two_calls_of_one_pass_are_handed_over_as_a_sum(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    (module(rows())[0].sum() + module(rows() * 2)[0].square().sum()).backward()
    expected = [weight.grad for weight in module.parameters()]
    hide(module)
    (module(rows())[0].sum() + module(rows() * 2)[0].square().sum()).backward()
    ((found, _),) = hand_off.taken
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and torch.equal(ours, theirs)


def test_a_pass_that_failed_between_two_calls_leaves_nothing(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    hide(module)

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("refused")

    first = module(rows())[0]
    middle = first.tanh()
    middle.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        module(middle)[0].sum().backward()
    assert hand_off.taken == []
    del first, middle
    module(rows())[0].sum().backward()
    ((found, _),) = hand_off.taken
    expected = rows().chunk(PARTS)
    assert torch.equal(found[0], torch.ones(1, WIDTH).t() @ expected[0])


def test_the_weights_that_are_used_beside_are_named(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    hide(module)
    weights = list(module.parameters())
    (module(rows())[0].sum() + weights[2].sum()).backward()
    ((_, used),) = hand_off.taken
    assert used == [place == 2 for place in range(PARTS)]
    module(rows())[0].sum().backward()
    assert hand_off.taken[1][1] == [False] * PARTS


def hooked(module: Any) -> None:
    module.weight1.register_hook(lambda gradient: gradient * 2)


def hooked_after(module: Any) -> None:
    module.weight1.register_post_accumulate_grad_hook(lambda _: None)


def frozen(module: Any) -> None:
    module.weight1.requires_grad_(False)


def computed_later(module: Any) -> None:
    module.weight1.skip_backward_post_hook = True


@pytest.mark.parametrize("change", [hooked, hooked_after, computed_later])
def test_weights_that_are_more_than_weights_are_left_to_autograd(
    module: Grouped, hand_off: HandOff, hide: Hide, change: Callable[[Any], None]
) -> None:
    hide(module)
    module(rows())[0].sum().backward()
    assert len(hand_off.taken) == 1
    change(module)
    module(rows())[0].sum().backward()
    assert len(hand_off.taken) == 1


@pytest.mark.parametrize("change", [hooked, hooked_after, computed_later])
def test_weights_that_change_between_the_passes_end_the_run(
    module: Grouped, hand_off: HandOff, hide: Hide, change: Callable[[Any], None]
) -> None:
    hide(module)
    loss = module(rows())[0].sum()
    change(module)
    with pytest.raises(FastPathError, match="after the forward pass"):
        loss.backward()
    assert hand_off.taken == []


def test_only_what_needs_a_gradient_is_hidden(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    hide(module)
    frozen(module)
    module(rows())[0].sum().backward()
    ((found, _),) = hand_off.taken
    assert len(found) == PARTS - 1 and all(w.grad is None for w in module.parameters())


def test_weights_that_nobody_takes_or_that_are_few_are_left_to_autograd(
    module: Grouped, hand_off: HandOff, hide: Hide, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(module)
    with monkeypatch.context() as patch:
        patch.setattr(hand_off, "knows", lambda one: one is not module.weight5)
        module(rows())[0].sum().backward()
    for number in range(3):
        module.get_parameter(f"weight{number}").requires_grad_(False)
    module(rows())[0].sum().backward()
    assert hand_off.taken == [] and module.weight5.grad is not None


def test_calls_without_a_backward_pass_are_not_kept(
    module: Grouped, hand_off: HandOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    hide = hand_off.hide

    def hiding(weights: list[Any], to_come: Any) -> list[Any]:
        made.append(to_come)
        return hide(weights, to_come)

    monkeypatch.setattr(hand_off, "hide", hiding)
    hidden = HiddenWeights(nn.Sequential(module), hand_off)  # type: ignore[arg-type]
    undo = hide_in(sys.modules[__name__], "_Grouped", hidden)
    for _ in range(10):
        module(rows())
    (to_come,) = made
    assert not to_come() and len(to_come.__self__._calls) == 1
    undo()


def test_a_weight_that_an_operation_has_twice_is_left_to_autograd(
    module: Grouped, hand_off: HandOff, hide: Hide
) -> None:
    module._parameters["weight5"] = module._parameters["weight0"]
    hide(module)
    module(rows())[0].sum().backward()
    assert hand_off.taken == [] and all(w.grad is not None for w in module.parameters())


def test_a_function_whose_weights_are_not_last_is_refused(hand_off: HandOff) -> None:
    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: Any, weight: Any) -> Any: ...

    hidden = HiddenWeights(nn.Sequential(), hand_off)  # type: ignore[arg-type]
    place = SimpleNamespace(Fixed=Fixed)
    with pytest.raises(UpstreamChangedError, match="weights come last"):
        hide_in(place, "Fixed", hidden)
    assert place.Fixed is Fixed


def test_two_models_share_the_stand_in_and_leave_in_any_order(
    module: Grouped, hand_off: HandOff
) -> None:
    other, place, function = Grouped(), sys.modules[__name__], _Grouped
    models = [nn.Sequential(module), nn.Sequential(other)]
    undo = [
        hide_in(place, "_Grouped", HiddenWeights(model, hand_off))  # type: ignore[arg-type]
        for model in models
    ]
    module(rows())[0].sum().backward()
    assert len(hand_off.taken) == 1
    undo[0]()
    module(rows())[0].sum().backward()
    assert len(hand_off.taken) == 1 and _Grouped is not function
    undo[1]()
    assert _Grouped is function
