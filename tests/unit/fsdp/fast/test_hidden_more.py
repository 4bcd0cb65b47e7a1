"""Hidden weights: the numbers of Megatron-FSDP alone, or an error, where passes are unusual."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.cpu.launch import run_processes
from megatron_cg.errors import FastPathError
from megatron_cg.fsdp.fast.hidden import HiddenWeights, hide_in

pytest.importorskip("megatron_fsdp")

PARTS, WIDTH = 6, 4


class _Grouped(torch.autograd.Function):
    """Rows in equal shares, each share times a weight of its own."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        context.save_for_backward(rows, *weights)
        shares = zip(rows.chunk(len(weights)), weights, strict=True)
        return torch.cat([share @ weight.t() for share, weight in shares])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        rows, *weights = context.saved_tensors
        shares = list(zip(gradient.chunk(len(weights)), rows.chunk(len(weights)), strict=True))
        back = torch.cat([g @ weight for (g, _), weight in zip(shares, weights, strict=True)])
        return back, *[(g.t() @ share).to(Grouped.gradients) for g, share in shares]


class Grouped(nn.Module):
    """Some experts, as a grouped GEMM has them."""

    gradients = torch.float32

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARTS):
            weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., Any] = _Grouped.apply
        output: torch.Tensor = apply(rows, *self._parameters.values())
        return output


class Layer(nn.Module):
    """An FSDP unit whose experts are called once, or twice with something between."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.dense, self.grouped, self.twice = nn.Linear(WIDTH, WIDTH), Grouped(), twice
        self.refuses = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.dense(rows).tanh()
        if self.twice:
            rows = self.grouped(rows).tanh()
            if self.refuses:
                rows.register_hook(refuse)
        output: torch.Tensor = self.grouped(rows)
        return output


def refuse(_: torch.Tensor) -> None:
    raise ValueError("refused")


def double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


WAYS = {
    "penalty outside": "own hooks run before Megatron-FSDP's root hook begins the pass",
    "hooked late": "a tensor hook is registered between forward and backward",
    "by name": "backward(inputs=weights) asks for what autograd does not see",
    "failed": "a pass that failed left gradients to wait",
}


def backward(way: str, model: Any, layers: list[Layer], loss: torch.Tensor) -> None:
    if way == "penalty outside":
        weights = [w for layer in layers for w in [*layer.grouped.parameters()][1::2]]
        model.all_gather_and_wait_parameters_ready(weights, prefetch=False)
        loss = loss + torch.stack([weight.sum() for weight in weights]).sum() * 0.3
    hooks = []
    if way == "hooked late":
        hooks = [layer.grouped.get_parameter("weight1").register_hook(double) for layer in layers]
    if way == "by name":
        loss.backward(inputs=list(model.param_and_grad_buffer.params))
    else:
        loss.backward()
    for hook in hooks:
        hook.remove()


def fit(way: str, fast: bool) -> list[Any]:
    """Losses; those up to a FastPathError, and its name, where there is one."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_cg.fsdp import fast as fast_path

    torch.manual_seed(0)
    layers = [Layer(way == "failed"), Layer(way == "failed")]
    model: Any = fully_shard_model(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        calculate_per_token_loss=True,
    )
    model.set_model_auto_sync(False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.003))
    found: list[Any] = []
    with ExitStack() as undo:
        for step in range(4):
            if fast and step == 1:
                path = fast_path.install(model)
                undo.callback(path.close)
                assert path.hand_off is not None
                hidden = HiddenWeights(model.module, path.hand_off)
                undo.callback(hide_in(sys.modules[__name__], "_Grouped", hidden))
            optimizer.zero_grad()
            rows = torch.arange(2.0 * PARTS * WIDTH).reshape(2 * PARTS, WIDTH) + dist.get_rank()
            rows = (rows * (1 + step)).sin().requires_grad_()
            if way == "failed" and step == 2:
                layers[0].refuses = True
                with pytest.raises(ValueError, match="refused"):
                    model(rows).square().sum().backward()
                layers[0].refuses = False
            try:
                loss = model(rows).square().sum()
                found.append(loss.item())
                backward(way, model, layers, loss)
            except FastPathError as error:
                return [*found, type(error).__name__]
            model.finish_grad_sync()
            optimizer.step()
    return found


def fit_all(folder: Path) -> None:
    for way in WAYS:
        try:
            runs = [fit(way, False), fit(way, True)]
        except Exception as error:
            # A failure of its own, that says nothing of the others.
            runs = [[], [repr(error)]]
        (folder / f"{way}-{dist.get_rank()}.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hidden-more")
    run_processes(partial(fit_all, found))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_same_or_there_is_an_error(folder: Path, way: str) -> None:
    for rank in range(2):
        eager, fast = json.loads((folder / f"{way}-{rank}.json").read_text())
        loud = fast[-1] == FastPathError.__name__
        until = len(fast) - loud
        assert fast[:until] == eager[:until] and (loud or len(fast) == len(eager)), WAYS[way]


class HandOff:
    """Keeps what it is given."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = set(module.parameters())
        self.taken: list[list[torch.Tensor]] = []

    def knows(self, parameter: object) -> bool:
        return parameter in self.parameters

    def hide(self, weights: Any, _to_come: Any) -> Any:
        return weights

    def show(self, _weights: Any) -> None: ...

    def take_hidden(self, _weights: Any, gradients: Any, _used: Any) -> None:
        self.taken.append(list(gradients))


def grouped() -> Any:
    torch.manual_seed(0)
    module = Grouped()
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: None)
    return module


def given() -> torch.Tensor:
    return torch.arange(float(PARTS * WIDTH)).reshape(PARTS, WIDTH).sin().requires_grad_()


def hide(module: nn.Module, hand_off: Any) -> Callable[[], None]:
    hidden = HiddenWeights(nn.Sequential(module), hand_off)
    return hide_in(sys.modules[__name__], "_Grouped", hidden)


def test_a_weight_that_was_frozen_at_first_gets_its_gradient() -> None:
    module = grouped()
    hand_off = HandOff(module)
    module.weight1.requires_grad_(False)
    undo = hide(module, hand_off)
    try:
        module(given()).sum().backward()
        module.weight1.requires_grad_(True)
        module(given()).sum().backward()
    finally:
        undo()
    assert module.weight1.grad is not None or len(hand_off.taken[-1]) == PARTS


def test_gradients_are_cast_before_they_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grouped, "gradients", torch.bfloat16)
    module = grouped()
    hand_off = HandOff(module)

    def loss() -> torch.Tensor:
        found: torch.Tensor = module(given()).square().sum()
        second: torch.Tensor = module(given() * 0.37).sin().sum()
        return found + second

    loss().backward()
    expected = [weight.grad for weight in module.parameters()]
    undo = hide(module, hand_off)
    try:
        loss().backward()
    finally:
        undo()
    (found,) = hand_off.taken
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs)


def test_a_model_that_is_between_two_steps_as_another_runs_is_hidden_later() -> None:
    first, second = grouped(), grouped()
    ours, theirs = HandOff(first), HandOff(second)
    raw = dict(second._parameters)
    # As Megatron-FSDP's swap leaves it; the other model comes first to its function.
    second._parameters.update({name: nn.Parameter(torch.zeros(1)) for name in raw})
    undo = [hide(second, theirs), hide(first, ours)]
    try:
        first(given()).sum().backward()
        second._parameters.update(raw)
        second(given()).sum().backward()
    finally:
        for one in undo:
            one()
    assert len(ours.taken) == 1 and len(theirs.taken) == 1


def test_a_second_pass_over_a_kept_graph_is_handed_over_once_too() -> None:
    module = grouped()
    hand_off = HandOff(module)
    undo = hide(module, hand_off)
    try:
        loss = module(given()).sum() + module(given() * 2).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    finally:
        undo()
    assert len(hand_off.taken) == 2
