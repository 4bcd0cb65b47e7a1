"""What the host does between the passes of two steps: as Megatron and Megatron-FSDP do it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_cg.fastpath.between_passes import (
    exchange_parameters,
    scale_local_gradients,
    vote_beside,
)
from tests.unit.fastpath.test_adam import MODULES, MultiTensorApply, imported

EXCHANGES = "_replace_param_with_distributed_if_needed", "_replace_param_with_raw_if_needed"


def on_modules(fsdp: Any) -> list[tuple[str, int]]:
    named = fsdp.module.named_parameters(remove_duplicate=False)
    return [(name, id(parameter)) for name, parameter in named]


class Assigned(nn.Linear):
    """Keeps what it is assigned elsewhere too, as Transformer Engine's operations do."""

    def register_parameter(self, name: str, parameter: nn.Parameter | None) -> None:
        super().register_parameter(name, parameter)
        vars(self)[f"{name}_of_operation"] = parameter


def linear(fsdp: Any) -> Any:
    return fsdp.module.get_submodule("module.decoder.layers.0.mlp.linear_fc1")


def other_parameter(fsdp: Any) -> None:
    linear(fsdp).weight = nn.Parameter(torch.zeros_like(linear(fsdp).weight))


def other_module(fsdp: Any) -> None:
    layers = fsdp.module.get_submodule("module.decoder.layers")
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def other_raw(fsdp: Any) -> None:
    name = next(iter(fsdp.raw_param))
    fsdp.raw_param[name] = nn.Parameter(torch.zeros(1))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": other_parameter,
    "modules": other_module,
    "what is set": other_raw,
    "a hook": lambda _: register_module_parameter_registration_hook(lambda *_: None),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_get_the_parameters_that_megatron_fsdp_sets(
    dense_model: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp, calls = dense_model.module, list[str]()
    linear(fsdp).__class__ = type("Assigned", (Assigned, type(linear(fsdp))), {})
    for name in EXCHANGES:
        own = getattr(type(fsdp), name)

        def counted(self: Any, own: Any = own, name: str = name) -> None:
            calls.append(name)
            own(self)

        monkeypatch.setattr(type(fsdp), name, counted)
    distributed, raw = (getattr(type(fsdp), name) for name in EXCHANGES)
    distributed(fsdp)
    sharded = on_modules(fsdp)
    raw(fsdp)
    undo = exchange_parameters(fsdp)
    calls.clear()
    whole = on_modules(fsdp)
    for _ in range(3):
        fsdp._replace_param_with_distributed_if_needed()
        assert on_modules(fsdp) == sharded and fsdp.is_param_fsdp_distributed
        assert linear(fsdp).weight_of_operation is linear(fsdp).weight
        fsdp._replace_param_with_raw_if_needed()
        fsdp._replace_param_with_raw_if_needed()
        assert on_modules(fsdp) == whole and not fsdp.is_param_fsdp_distributed
        assert linear(fsdp).weight_of_operation is linear(fsdp).weight
    assert calls == [EXCHANGES[0]]
    handle = CHANGES[change](fsdp)
    fsdp._replace_param_with_distributed_if_needed()
    assert on_modules(fsdp) == sharded
    assert calls == [EXCHANGES[0]] * (1 if change == "nothing" else 2)
    if handle is not None:
        handle.remove()
    undo()
    assert not any(name in vars(fsdp) for name in EXCHANGES)


class Another(torch.Tensor):
    pass


def another(change: Callable[[torch.Tensor], torch.Tensor], parameters: list[nn.Parameter]) -> None:
    gradient: Any = parameters[0].grad
    gradient._local_tensor = change(gradient._local_tensor)


def no_dtensor(parameters: list[nn.Parameter]) -> None:
    gradient: Any = parameters[0].grad
    parameters[0].grad = gradient.to_local()


GIVEN: dict[str, tuple[Callable[[list[nn.Parameter]], None], Any, int]] = {
    "large": (lambda _: None, torch.tensor([8.0]), 0),
    "small": (lambda _: None, torch.tensor([0.5]), 0),
    "a number": (lambda _: None, 8.0, 1),
    "another dtype": (partial(another, torch.Tensor.bfloat16), torch.tensor([8.0]), 1),
    "no DTensor": (no_dtensor, torch.tensor([8.0]), 1),
    "another class": (
        partial(another, lambda local: local.as_subclass(Another)),
        torch.tensor([8.0]),
        1,
    ),
    "none": (list.clear, torch.tensor([8.0]), 1),
}
"""What is changed, the norm, and the calls of Megatron's own function."""


@pytest.mark.parametrize("given", GIVEN)
def test_gradients_are_scaled_as_by_megatron(
    one_rank: None, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer import clip_grads, optimizer

    launches: list[Any] = []

    def kernel(chunk: int, flag: torch.Tensor, lists: Any, factor: torch.Tensor) -> None:
        launches.append((chunk, flag.tolist(), [len(tensors) for tensors in lists]))
        assert all(tensor.numel() for tensor in lists[0])
        for tensor in lists[0]:
            tensor.mul_(factor)

    calls: list[bool] = []
    own = clip_grads.clip_grad_by_total_norm_fp32

    def counted(*args: Any, **named: Any) -> None:
        calls.append(True)
        own(*args, **named)

    # Megatron asks for gradients on a GPU.
    monkeypatch.setattr(torch.Tensor, "type", lambda _: "torch.cuda.FloatTensor")
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", kernel)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", kernel)
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", MultiTensorApply(1 << 16))
    monkeypatch.setattr(optimizer, "clip_grad_by_total_norm_fp32", counted)
    mesh = init_device_mesh("cpu", (1,))
    change, norm, by_megatron = GIVEN[given]
    runs = []
    with imported(MODULES):
        for ours in (False, True):
            torch.manual_seed(1)
            parameters = [nn.Parameter(torch.randn(3, n)) for n in (2, 0, 4, 5)]
            for parameter in parameters[:3]:
                made = distribute_tensor(torch.randn_like(parameter), mesh, [Replicate()])
                parameter.grad = made
            change(parameters)
            undo = scale_local_gradients() if ours else lambda: None
            launches.clear()
            calls.clear()
            optimizer.clip_grad_by_total_norm_fp32(parameters, max_norm=1.0, total_norm=norm)
            undo()
            values = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
            runs.append(([v if v is None else v.tolist() for v in values], [*launches]))
    assert runs[0] == runs[1]
    assert len(calls) == by_megatron
    assert optimizer.clip_grad_by_total_norm_fp32 is counted


def test_a_vote_is_on_a_stream_of_its_own(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.rerun_state_machine import RerunStateMachine

    done: list[Any] = []

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        done.append(stream)
        yield
        done.append("back")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "beside")
    monkeypatch.setattr(torch.cuda, "stream", on)
    reduce = RerunStateMachine._reduce_any
    undo = vote_beside()
    machine: Any = object.__new__(RerunStateMachine)
    assert machine._reduce_any([True, False]) == (True, False)
    assert machine._reduce_any(True) is True and machine._reduce_any(False) is False
    assert done == ["beside", "back"] * 3
    undo()
    assert RerunStateMachine._reduce_any is reduce
