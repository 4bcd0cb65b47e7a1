"""What the host does between the passes of two steps: as Megatron and Megatron-FSDP do it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
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
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.fastpath.test_adam import MODULES, Another, MultiTensorApply, another, imported
from tests.unit.trainers import trainer_of

EXCHANGES = "_replace_param_with_distributed_if_needed", "_replace_param_with_raw_if_needed"


class Keeping(nn.Module):
    """Keeps what it is assigned elsewhere too, as Transformer Engine's operations do."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        vars(self)["kept"] = param


def layers(fsdp: Any) -> Any:
    return fsdp.module.get_submodule("module.decoder.layers")


def linear(fsdp: Any, layer: int = 0) -> Any:
    return layers(fsdp)[layer].mlp.linear_fc1


def other_parameter(fsdp: Any) -> None:
    linear(fsdp).weight = nn.Parameter(torch.zeros_like(linear(fsdp).weight))


def other_module(fsdp: Any) -> None:
    first, second = layers(fsdp)[:2]
    first.mlp, second.mlp = second.mlp, first.mlp


def other_raw(fsdp: Any) -> None:
    fsdp.raw_param[next(iter(fsdp.raw_param))] = nn.Parameter(torch.zeros(1))


def other_names(fsdp: Any) -> None:
    first, second, *others = fsdp.raw_param
    fsdp.raw_param = dict(zip((second, first, *others), fsdp.raw_param.values(), strict=True))


def other_class(fsdp: Any) -> None:
    linear(fsdp).__class__ = type("Kept", (Keeping, type(linear(fsdp))), {})


@contextmanager
def hidden(fsdp: Any) -> Iterator[None]:
    """Megatron-FSDP finds another module by the name of one."""
    mlp = layers(fsdp)[0].mlp
    vars(mlp)["linear_fc1"] = linear(fsdp, 1)
    yield
    del vars(mlp)["linear_fc1"]


@contextmanager
def hooked(_fsdp: Any) -> Iterator[None]:
    def hook(_module: Any, _name: str, parameter: Any) -> Any:
        return nn.Parameter(parameter.detach())

    handle = register_module_parameter_registration_hook(hook)
    yield
    handle.remove()


@contextmanager
def kept_by(owner: Callable[[Any], Any], fsdp: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own = nn.Module.register_parameter

        def register(self: Any, name: str, parameter: Any) -> None:
            own(self, name, parameter)
            vars(self)["kept"] = parameter

        of_object = isinstance(owner(fsdp), nn.Module)
        method = MethodType(register, owner(fsdp)) if of_object else register
        patch.setattr(owner(fsdp), "register_parameter", method)
        yield


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": other_parameter,
    "a tied weight": lambda fsdp: setattr(linear(fsdp, 1), "weight", linear(fsdp).weight),
    "modules": other_module,
    "what is set": other_raw,
    "names": other_names,
    "an attribute": lambda fsdp: vars(linear(fsdp)).update(weight=torch.zeros(1)),
    "a module's name": hidden,
    "a buffer": lambda fsdp: linear(fsdp)._buffers.update(weight=torch.zeros(1)),
    "a class": other_class,
    "a method of an object": partial(kept_by, linear),
    "a method of a class": partial(kept_by, lambda fsdp: type(linear(fsdp))),
    "torch's method": partial(kept_by, lambda _: nn.Module),
    "a hook": hooked,
    "nothing": lambda _: None,
}


def on_modules(fsdp: Any) -> list[Any]:
    """What each module has, by its place in Megatron-FSDP."""
    store = fsdp.param_and_grad_buffer.optimizer_named_parameters
    named = {id(p): ("raw", n) for n, p in fsdp.raw_param.items()}
    named |= {id(p): ("sharded", n) for n, p in store}
    found: list[Any] = [fsdp.is_param_fsdp_distributed]
    for place, module in fsdp.module.named_modules(remove_duplicate=False):
        own, kept = module._parameters, vars(module).get("kept")
        also = [name for name in own if name in vars(module) or name in module._buffers]
        here = {name: named.get(id(parameter)) for name, parameter in own.items()}
        found.append((place, here, also, named.get(id(kept))))
    return found


def exchanged(change: str, after: int, ours: bool) -> tuple[list[Any], list[int]]:
    """What modules have after each exchange, and how many Megatron-FSDP made in each third."""
    found: list[Any] = []
    calls = [0]
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        trainer = stack.enter_context(trainer_of(CpuModelConfig(layers=2)))
        fsdp = trainer.model.module
        for name in EXCHANGES:
            own = getattr(type(fsdp), name)

            def counted(own: Any = own) -> None:
                calls[-1] += 1
                own(fsdp)

            patch.setattr(fsdp, name, counted)
        for name in reversed(EXCHANGES):
            getattr(type(fsdp), name)(fsdp)
        undo = exchange_parameters(fsdp) if ours else lambda: None

        def exchange(times: int) -> None:
            for number in range(times):
                getattr(fsdp, EXCHANGES[fsdp.is_param_fsdp_distributed])()
                found.append((number, on_modules(fsdp)))

        exchange(6 + after)
        calls.append(0)
        made = CHANGES[change](fsdp)
        with made if made is not None else nullcontext():
            exchange(5)
        calls.append(0)
        exchange(6)
        calls.append(0)
        exchange(4)
        undo()
    return found, calls


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_modules_have_what_megatron_fsdp_sets(one_rank: None, change: str, after: int) -> None:
    (theirs, their_calls), (ours, calls) = (exchanged(change, after, way) for way in (False, True))
    assert ours == theirs
    assert their_calls == [6 + after, 5, 6, 4]
    assert calls[0] == 2 and calls[-1] == 0
    assert (calls[1] == 0) == (change == "nothing")


def no_dtensor(parameters: list[nn.Parameter]) -> None:
    gradient: Any = parameters[0].grad
    parameters[0].grad = gradient.to_local()


LARGE = torch.tensor([8.0])
GIVEN: dict[str, tuple[Callable[[list[nn.Parameter]], None], Any, int]] = {
    "large": (lambda _: None, LARGE, 0),
    "small": (lambda _: None, torch.tensor([0.5]), 0),
    "a number": (lambda _: None, 8.0, 1),
    "another dtype": (partial(another, torch.Tensor.bfloat16), LARGE, 1),
    "no DTensor": (no_dtensor, LARGE, 1),
    "another device": (partial(another, torch.Tensor.to, device="meta"), LARGE, 1),
    "another class": (partial(another, lambda local: local.as_subclass(Another)), LARGE, 1),
    "none": (list.clear, LARGE, 1),
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
            tensor.mul_(torch.as_tensor(factor).to(tensor.device))

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
            optimizer.clip_grad_by_total_norm_fp32(iter(parameters), max_norm=1.0, total_norm=norm)
            undo()
            values = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
            read = [None if v is None or v.is_meta else v.tolist() for v in values]
            runs.append((read, [*launches]))
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
