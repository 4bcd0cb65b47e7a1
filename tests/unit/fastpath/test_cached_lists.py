"""What Megatron-FSDP is shown of parameters and modules, and what it marks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath import install
from megatron_cg.fastpath.gather import DeferredPrefetch
from megatron_cg.fastpath.unshard import (
    CachedModules,
    CachedParameters,
    _gathered,
    _released,
    _shown,
)

MARKS = {"grad_added_to_main_grad": False, "__fsdp_param__": True, "overwrite_main_grad": True}


def parameters() -> list[Any]:
    """Two of one bucket, one of another, and one more of the first."""
    return [nn.Parameter(torch.zeros(1)) for _ in range(4)]


def cached(listed: list[Any]) -> CachedParameters:
    buckets = dict(zip(listed, (0, 0, 1, 0), strict=True))
    return CachedParameters(listed, buckets.__getitem__, lambda _: False)


def marks(parameter: Any) -> dict[str, Any]:
    return {name: vars(parameter)[name] for name in MARKS if name in vars(parameter)}


def test_what_megatron_is_not_shown_is_marked_once() -> None:
    asked: list[Any] = []
    gather = _gathered(lambda params, *args, **options: asked.append((params, args, options)))
    listed = parameters()
    ours = cached(listed)
    gather(ours, 1, bwd=True)
    ((shown, args, options),) = asked
    assert [id(p) for p in shown] == [id(listed[0]), id(listed[2])]
    assert (args, options) == ((1,), {"bwd": True})
    # Those that it is shown it marks itself.
    assert [marks(parameter) for parameter in listed] == [{}, MARKS, {}, MARKS]
    listed[1].grad_added_to_main_grad = True
    gather(ours)
    assert asked[1] == (ours.shown, (), {}) and listed[1].grad_added_to_main_grad
    # Another list has marks of its own to set.
    gather(cached(listed))
    assert not listed[1].grad_added_to_main_grad


def test_lists_of_others_are_megatrons_own() -> None:
    asked: list[Any] = []
    listed = parameters()
    _gathered(lambda params, **options: asked.append((params, options)))(listed, bwd=False)
    ((params, options),) = asked
    assert params is listed and options == {"bwd": False}
    assert not any(map(marks, listed))


@pytest.mark.parametrize("of_unit", [True, False])
def test_a_handler_is_shown_one_module_for_all_of_its_own_unit(of_unit: bool) -> None:
    unit, other = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    seen: list[Any] = []

    def handler(module: Any, *unused: Any) -> None:
        seen.append((isinstance(module, CachedModules), *unused))
        for one in module.modules():
            one._training_state = "before backward"

    before_backward = _shown(unit, handler)
    assert before_backward.__name__ == "handler"
    module = unit if of_unit else other
    before_backward(module, 1)
    assert seen == [(of_unit, 1)]
    for one in (*unit.modules(), *other.modules()):
        there = "_training_state" in vars(one)
        assert there == (one in set(module.modules()))


@pytest.mark.parametrize("bwd", [False, True])
def test_a_unit_is_released_at_once_unless_that_was_asked_otherwise(bwd: bool) -> None:
    unit: Any = nn.Linear(1, 1)
    released: list[tuple[Any, bool, bool]] = []
    listed: Any = nn.Module.parameters
    release = _released(
        lambda *given: released.append(given), listed, lambda _unit: None, DeferredPrefetch()
    )
    release(unit, bwd)
    release(unit, bwd, True)
    release(unit, bwd, lazy=True)
    assert [lazy for _, _, lazy in released] == [False, True, True]
    assert all(direction is bwd for _, direction, _ in released)


def walks(trainer: Any) -> int:
    """How often Megatron-FSDP looks up a layer's modules before backward passes, in one step."""
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    layers, own = {id(layer) for layer in transformer_layers(trainer.model)}, nn.Module.modules
    callers: list[str] = []

    def modules(self: nn.Module, *given: Any) -> Any:
        if id(self) in layers:
            callers.append(sys._getframe(1).f_code.co_name)
        return own(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "modules", modules)
        trainer.step()
    return callers.count("_pre_backward_param_unshard")


def test_no_layer_is_walked_over_before_its_backward_pass(one_rank: None) -> None:
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    trainer: Any = Trainer(TrainingPlan(CpuModelConfig(layers=2)))
    assert walks(trainer) == 2
    path = install(trainer.model.module)
    assert walks(trainer) == 0
    path.close()
    assert walks(trainer) == 2
