"""The shorter step of FusedAdam: the same launches as Transformer Engine's own step makes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron_cg.fastpath.optimizer_step import install_adam
from megatron_cg.fastpath.part import NotApplicableError
from tests.unit.counted import calls_of
from tests.unit.te_sources import source_of_te

OPTIMIZERS = "transformer_engine.pytorch.optimizers"


@contextmanager
def imported(modules: dict[str, Any]) -> Iterator[None]:
    """Let ``import`` find these, and those that are added to them."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    yield
    for name in modules:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if module is not None})


def loaded() -> dict[str, Any]:
    """TE's two modules of its optimizer, from its sources, and empty ones that they import."""
    names = {
        "transformer_engine": (),
        "transformer_engine_torch": (
            *("multi_tensor_adam", "multi_tensor_adam_param_remainder", "multi_tensor_adam_fp8"),
            *("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
        ),
        "transformer_engine.pytorch": (),
        "transformer_engine.pytorch.constants": ("DType",),
        "transformer_engine.pytorch.tensor.float8_tensor": ("Float8Tensor", "Float8Quantizer"),
        "transformer_engine.pytorch.quantized_tensor": ("QuantizedTensor",),
        OPTIMIZERS: (),
    }
    modules: dict[str, Any] = {}
    for name, kinds in names.items():
        modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(modules[name]).update({kind: type(kind, (), {"kFloat32": 0}) for kind in kinds})
    with imported(modules):
        for name in ("multi_tensor_apply", "fused_adam"):
            spec = spec_from_file_location(
                f"{OPTIMIZERS}.{name}", source_of_te("optimizers", f"{name}.py")
            )
            assert spec is not None and spec.loader is not None
            modules[spec.name] = sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(modules[spec.name])
    return modules


MODULES = loaded()
fused_adam = MODULES[f"{OPTIMIZERS}.fused_adam"]
MultiTensorApply: Any = type(fused_adam.multi_tensor_applier)


def kernel(chunk: int, flag: Any, tensors: Any, lr: float, *numbers: Any) -> None:
    """Something of every number and tensor, in place, instead of the CUDA kernel."""
    beta1, beta2, eps, step, _mode, _correction, decay = numbers
    assert tensors[0] and all(tensor.numel() for row in tensors for tensor in row)
    assert chunk == 65536 and flag.tolist() == [0]
    for gradient, weight, first, second in zip(*tensors, strict=True):
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.sub_(lr * (first / (second.sqrt() + eps) / step + decay * weight))


@pytest.fixture(autouse=True)
def fakes(one_rank: None) -> Iterator[None]:
    with imported(MODULES):
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
        {"params": [nn.Parameter(p.detach()) for p in some[3:4]]},  # of no elements
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
        chained: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)])
        with calls_of(fused_adam.FusedAdam, "step") as te_s:
            undo = install_adam([chained]) if kept else (lambda: None)
            for number in (2, 3, 4, 5):
                step(adam, number)
            assert len(te_s) == (0 if kept else 4)
            undo()
        assert "step" not in vars(adam)
        step(adam, 6)
        runs.append(values(adam))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 10


class Eager(MultiTensorApply):  # type: ignore[misc]
    """Does more than TE's: a learning rate that is doubled."""

    def __call__(self, kernel: Any, flag: Any, lists: Any, *numbers: Any) -> Any:
        return super().__call__(kernel, flag, lists, 2 * numbers[0], *numbers[1:])


class Another(torch.Tensor):
    pass


def of_two_kinds(adam: Any) -> None:
    other = nn.Parameter(torch.randn(2, 2))
    other.grad = torch.randn(2, 2)
    adam.param_groups[1]["params"].append(other)
    adam.initialize_state(other, False)


def another(change: Callable[..., torch.Tensor], parameters: list[Any], **how: Any) -> None:
    """Change the part of a gradient that is on this rank."""
    gradient = parameters[0].grad
    gradient._local_tensor = change(gradient._local_tensor, **how)


def of_another(change: Callable[[torch.Tensor], torch.Tensor], adam: Any) -> None:
    another(change, adam.param_groups[0]["params"])


CHANGES: dict[str, Callable[[Any], object]] = {
    "two kinds": of_two_kinds,
    "lower precision": partial(of_another, torch.Tensor.bfloat16),
    "another class": partial(of_another, lambda local: local.as_subclass(Another)),
    "more state": lambda adam: adam.state[adam.param_groups[0]["params"][1]].update(
        more=torch.zeros(1)
    ),
    "a hook": lambda adam: adam.register_step_post_hook(lambda *_: None),
    "doubled": lambda _: setattr(fused_adam, "multi_tensor_applier", Eager(65536)),
    "without chunk size": lambda _: setattr(
        fused_adam, "multi_tensor_applier", MultiTensorApply(65536).__call__
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_unusual_is_te_s(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ours and without, the same comes of steps of which two are ours, and none from then."""
    runs, own = [], fused_adam.multi_tensor_applier
    for ours in (False, True):
        monkeypatch.setattr(fused_adam, "multi_tensor_applier", own)
        adam = adam_of(parameters("DTensor"))
        step(adam, 1)
        with calls_of(fused_adam.FusedAdam, "step") as te_s:
            if ours:
                install_adam([adam])
            for number in (2, 3):
                step(adam, number)
            torch.manual_seed(2)
            CHANGES[change](adam)
            adam.step()
        assert len(te_s) == (1 if ours else 3)
        runs.append(values(adam))
    assert runs[0] == runs[1]


def test_other_optimizers_are_left_alone() -> None:
    some = parameters("plain")
    with pytest.raises(NotApplicableError, match="is not FusedAdam"):
        install_adam([torch.optim.Adam(some)])
    adam = adam_of(some)
    adam.step = adam.step
    with pytest.raises(NotApplicableError, match="a step of its own"):
        install_adam([adam])
    adam = adam_of(some, master_weights=True)
    with pytest.raises(NotApplicableError, match="keeps main weights itself"):
        install_adam([adam])
    assert "step" not in vars(adam)
