"""The shorter step of FusedAdam: the same launches as Transformer Engine's own step makes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron_cg.cpu.standins import cpu_standins
from megatron_cg.fsdp.fast.adam import LocalStep, install_adam
from megatron_cg.fsdp.fast.steps_aside import StepsAsideError

fused_adam = pytest.importorskip(
    "transformer_engine.pytorch.optimizers.fused_adam",
    reason="needs transformer-engine with its torch extension",
    exc_type=ImportError,
)


def kernel(_chunk: int, _flag: Any, tensors: Any, lr: float, *numbers: Any) -> None:
    """Something of every number and tensor, in place, in the place of the CUDA kernel."""
    beta1, beta2, eps, step, _mode, _correction, decay = numbers
    for gradient, weight, first, second in zip(*tensors, strict=True):
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(lr * (first / (second.sqrt() + eps) / step + decay * weight))


@pytest.fixture(autouse=True)
def standins(one_rank: None) -> Iterator[None]:
    with cpu_standins():
        yield


def parameters(kind: str) -> list[Any]:
    torch.manual_seed(1)
    plain = [nn.Parameter(torch.randn(3, n)) for n in (2, 1, 4, 0, 5)]
    if kind == "plain":
        return plain
    mesh = init_device_mesh("cpu", (1,))
    return [nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])) for p in plain]


def adam_of(some: list[Any], **options: Any) -> Any:
    groups = [
        {"params": some[:3], "weight_decay": 0.1},
        {"params": some[3:], "weight_decay": 0.0, "lr": 1e-3},
        {"params": []},
    ]
    adam = fused_adam.FusedAdam(groups, lr=1e-2, **options)
    adam.multi_tensor_adam = kernel
    return adam


def step(adam: Any, number: int) -> None:
    for group in adam.param_groups:
        group["lr"] = 1e-2 / number
        for place, parameter in enumerate(group["params"]):
            skipped = place == 1 and number == 3
            parameter.grad = None if skipped else (parameter.detach() * number).sin()
    adam.step()


def values(adam: Any) -> list[Any]:
    found: list[Any] = []
    for group in adam.param_groups:
        found.append(group["step"])
        for parameter in group["params"]:
            state = adam.state[parameter]
            tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
            found += [getattr(t, "_local_tensor", t).tolist() for t in tensors]
    return found


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
@pytest.mark.parametrize("most", [1000, 2])
def test_weights_moments_and_steps_are_those_of_te(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_adam, "_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL", most)
    runs = []
    for kept in (False, True):
        adam = adam_of(parameters(kind))
        step(adam, 1)
        undo = install_adam([chained(adam)]) if kept else (lambda: None)
        for number in (2, 3, 4, 5):
            step(adam, number)
        if kept:
            assert adam.step.steps == 3
        undo()
        assert "step" not in vars(adam)
        step(adam, 6)
        runs.append(values(adam))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 10


def chained(adam: Any) -> Any:
    """As Megatron has it."""
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])


def test_what_a_checkpoint_replaced_is_read_anew() -> None:
    runs = []
    for kept in (False, True):
        adam = adam_of(parameters("plain"))
        step(adam, 1)
        saved = adam.state_dict()
        if kept:
            install_adam([adam])
        for number in (2, 3):
            step(adam, number)
        adam.load_state_dict(saved)
        step(adam, 4)
        first = adam.param_groups[0]["params"][0]
        adam.state[first]["exp_avg"] = torch.ones_like(adam.state[first]["exp_avg"])
        step(adam, 5)
        adam.state[first] = {name: value * 2 for name, value in adam.state[first].items()}
        step(adam, 6)
        other = nn.Parameter(first.detach() * 3)
        adam.state[other] = adam.state.pop(first)
        adam.param_groups[0]["params"][0] = other
        step(adam, 7)
        runs.append(values(adam))
    assert runs[0] == runs[1]


def test_old_moments_are_not_kept_alive() -> None:
    adam = adam_of(parameters("plain"))
    step(adam, 1)
    install_adam([adam])
    for number in (2, 3):
        step(adam, number)
    saved = copy.deepcopy(adam.state_dict())
    old = [weakref.ref(state["exp_avg"]) for state in adam.state.values()]
    adam.load_state_dict(saved)
    gc.collect()
    assert len(old) == 5 and not any(moment() is not None for moment in old)


def test_a_step_that_is_another_than_expected_stays_te_s(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = adam_of(parameters("plain"))
    step(adam, 1)
    install_adam([adam])
    monkeypatch.setattr(LocalStep, "_calls", lambda self: [])
    step(adam, 2)
    step(adam, 3)
    assert adam.step.steps == 0 and [g["step"] for g in adam.param_groups] == [3, 3, 3]
    assert "FusedAdam's step is left to Transformer Engine" in caplog.text


@pytest.mark.parametrize("what", ["hook", "first step"])
def test_hooks_and_the_first_step_are_te_s(what: str) -> None:
    adam, seen = adam_of(parameters("plain")), []
    if what == "hook":
        step(adam, 1)
        adam.register_step_post_hook(lambda *_: seen.append(1))
    install_adam([adam])
    step(adam, 2)
    step(adam, 3)
    if what == "hook":
        assert adam.step.steps == 0 and len(seen) == 2
    else:
        step(adam, 4)
        assert adam.step.steps == 1


def test_other_optimizers_are_left_alone() -> None:
    some = parameters("plain")
    with pytest.raises(StepsAsideError, match="is not FusedAdam"):
        install_adam([torch.optim.Adam(some)])
    adam = adam_of(some)
    adam.step = adam.step
    with pytest.raises(StepsAsideError, match="a step of its own"):
        install_adam([adam])
    adam = adam_of(some, master_weights=True)
    with pytest.raises(StepsAsideError, match="keeps main weights itself"):
        install_adam([adam])
    assert "step" not in vars(adam)
