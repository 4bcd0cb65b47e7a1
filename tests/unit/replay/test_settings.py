"""What people change on Megatron's layers while graphs live: trained eagerly, and reported."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import relu

from megatron_cg.errors import HookError
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.ranks import on_ranks
from tests.unit.trainers import evaluate, helper_of, layers_of, microbatch_of, trainer_of

DENSE: dict[str, Any] = {"layers": 2, "graph_modules": ("attn", "mlp"), "bf16": False}
MOE: dict[str, Any] = {"layers": 2, "experts": 4, "graph_modules": ("attn", "moe_router")}
LISTED = {"options": {"moe_layer_freq": [1, 1]}}
ATTENTION, SCALE = "self_attention.core_attention", "main_loss_backward_scale"
STEPS, CAPTURED, CHANGED = 7, 2, 4


def halved(old: Callable[..., Any]) -> Callable[..., Any]:
    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = old(self, *args, **kwargs)
        return output * 0.5, bias

    return function


def to(place: str, value: Any) -> Callable[[Any], object]:
    """Sets this attribute of a layer."""
    of, _, name = place.rpartition(".")
    return lambda layer: setattr(attrgetter(of)(layer), name, value)


def method(layer: Any) -> None:
    layer.mlp.bias_act_func = layer.mlp.forward
    layer.mlp._load_from_state_dict = lambda *_args: None
    layer._forward_mlp = lambda *args, _own=layer._forward_mlp, **kwargs: _own(*args, **kwargs) * 2


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], object], int]] = {
    "scale": (DENSE, to(f"{ATTENTION}.softmax_scale", 0.1), STEPS - CHANGED),
    "dropout": (
        DENSE | {"dropout": 0.1},
        to(f"{ATTENTION}.attention_dropout.p", 0.5),
        STEPS - CHANGED,
    ),
    "function": (DENSE, to("mlp.activation_func", relu), STEPS - CHANGED),
    "config": (DENSE, to("config.activation_func", relu), STEPS - CHANGED),
    "method": (DENSE, method, STEPS - CHANGED),
    "coefficient": (MOE, to("config.moe_aux_loss_coeff", 1.0), STEPS - CHANGED),
    "list in place": (
        MOE | LISTED,
        lambda layer: layer.config.moe_layer_freq.append(1),
        STEPS - CHANGED,
    ),
    "hook": (
        MOE,
        lambda layer: layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.0,)),
        STEPS - CHANGED,
    ),
    "loss scale": (
        MOE,
        lambda _: setattr(MoEAuxLossAutoScaler, SCALE, torch.full((1,), 3.0)),
        STEPS - CHANGED,
    ),
    "compiled": (DENSE, lambda layer: layer.mlp.compile(backend="eager"), STEPS - CHANGED),
    "bias rate": (MOE, to("config.moe_router_bias_update_rate", 0.1), 0),
    "nothing": (DENSE, lambda _layer: None, 0),
}
"""The model, what is changed on each layer before a step, and the steps that are not replayed."""


def trained(name: str, graphs: bool) -> tuple[list[Any], int]:
    shape, change, _ = deepcopy(CASES[name])
    numbers, mismatched = [], 0
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    with trainer_of(CpuModelConfig(**shape), graphs=graphs) as trainer:
        for step in range(STEPS):
            if graphs and step == CAPTURED:
                trainer.capture(TapeBackend())
            if step == CHANGED:
                for layer in layers_of(trainer):
                    change(layer)
            numbers.append(trainer.step())
        if graphs:
            mismatched = trainer.session.counters.mismatched
    return numbers, mismatched


def all_cases() -> dict[str, Any]:
    return {name: [trained(name, graphs) for graphs in (False, True)] for name in CASES}


def test_what_is_changed_on_a_layer_is_trained_eagerly_from_the_next_step_on() -> None:
    (found,) = on_ranks(all_cases, 1)
    for name, ((eager, _), (graphed, mismatched)) in found.items():
        layers, (_, _, steps) = 2, CASES[name]
        assert graphed == eager, name
        assert mismatched == steps * layers, name


def scheduled() -> list[Any]:
    """In the sixth pass, and in all of the fifth step, the scale is another one, and put back."""
    found: list[Any] = []
    for graphs in (False, True):
        with trainer_of(CpuModelConfig(**DENSE), microbatches=2) as trainer:
            attentions = [layer.self_attention.core_attention for layer in layers_of(trainer)]
            own, passes = attentions[0].softmax_scale, count()

            def set_scale(scale: float, attentions: list[Any] = attentions) -> None:
                for attention in attentions:
                    attention.softmax_scale = scale

            def begin(*_: Any, own: float = own, passes: Any = passes) -> None:
                set_scale(0.1 if next(passes) in (5, 8, 9) else own)

            trainer.model.register_forward_pre_hook(begin)
            trainer.model.register_forward_hook(lambda *_, own=own: set_scale(own))
            numbers = [trainer.step()]
            if graphs:
                trainer.capture(TapeBackend())
            found.append([*numbers, *(trainer.step() for _ in range(5))])
            assert not graphs or trainer.session.counters.mismatched == 3 * 2
    return found


def test_what_is_changed_for_one_pass_counts_in_that_pass() -> None:
    ((eager, graphed),) = on_ranks(scheduled, 1)
    assert eager == graphed


def compared(
    act: Callable[[Any], list[Any]], shape: dict[str, Any], **counts: int
) -> list[list[Any]]:
    """Numbers of an eager run and of one with graphs, whose counters are these in the end."""
    found = []
    for graphs in (False, True):
        with trainer_of(CpuModelConfig(**shape), graphs=graphs) as trainer:
            numbers = [trainer.step()]
            if graphs:
                trainer.capture(TapeBackend())
            found.append([*numbers, *act(trainer)])
            if graphs:
                expect(trainer.session.counters, **counts)
    return found


def of_class(trainer: Any) -> list[Any]:
    numbers = [trainer.step()]
    with patch.object(MLP, "forward", halved(MLP.forward)):
        numbers.append(trainer.step())
    return [*numbers, trainer.step()]


def test_a_method_of_a_class_counts_while_it_is_replaced() -> None:
    ((eager, graphed),) = on_ranks(partial(compared, of_class, DENSE, replayed=2 * 2), 1)
    assert eager == graphed and eager[1] != eager[2]


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor


def with_saved(trainer: Any) -> list[Any]:
    numbers = []
    for is_rounded in (False, True, False):
        hooks = saved_tensors_hooks(rounded, lambda saved: saved)
        with hooks if is_rounded else nullcontext():
            numbers.append(trainer.step())
    with torch.autograd.graph.save_on_cpu():
        return [*numbers, trainer.step()]


def test_hooks_that_change_saved_tensors_keep_a_graph_from_replaying() -> None:
    ((eager, graphed),) = on_ranks(partial(compared, with_saved, DENSE, mismatched=2), 1)
    assert eager == graphed


def after_an_error(trainer: Any) -> list[Any]:
    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    raising = layers_of(trainer)[1].mlp.experts.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        trainer.step()
    raising.remove()
    return [evaluate(trainer), trainer.step()]


def test_an_error_behind_a_router_leaves_nothing_for_the_next_pass() -> None:
    ((eager, graphed),) = on_ranks(partial(compared, after_an_error, MOE), 1)
    assert eager == graphed


@pytest.mark.parametrize("modules", [("attn", "mlp"), ("attn",)])
def test_a_layer_with_a_forward_of_its_own_is_refused(
    modules: tuple[str, ...], one_rank: None
) -> None:
    shape = CpuModelConfig(layers=2, graph_modules=modules)
    with microbatch_of(2), trainer_of(shape) as trainer:
        layer = layers_of(trainer)[1]
        kind = type(layer)
        own = type("Own", (kind,), {"forward": kind.forward})
        layer.__class__ = own
        with pytest.raises(HookError, match="layer 1: Own defines a forward"):
            helper_of(trainer, TapeBackend())
        layer.__class__ = kind
        helper = helper_of(trainer, TapeBackend())
        layer.forward = lambda *a, _own=layer.forward, **k: _own(*a, **k)
        with pytest.raises(HookError, match="layer 1: somebody has replaced forward"):
            helper.capture()
        helper.close()


def test_a_moe_layer_with_a_forward_of_its_own_is_refused(one_rank: None) -> None:
    with microbatch_of(2), trainer_of(CpuModelConfig(**MOE)) as trainer:
        mlp = layers_of(trainer)[0].mlp
        mlp.forward = lambda *a, _own=mlp.forward, **k: _own(*a, **k)
        with pytest.raises(HookError, match="replaced forward of a MoELayer"):
            helper_of(trainer, TapeBackend())
