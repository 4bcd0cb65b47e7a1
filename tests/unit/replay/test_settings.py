"""What people change on Megatron's layers while graphs live: trained eagerly, and reported."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import relu

from megatron_cg.errors import HookError
from megatron_cg.replay.guard import Objects
from megatron_cg.replay.settings import settings_of
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import compared, evaluate, helper_of, layers_of, microbatch_of, trainer_of
from tests.unit.units import sharded

DENSE: dict[str, Any] = {"layers": 2, "graph_modules": ("attn", "mlp"), "bf16": False}
MOE: dict[str, Any] = {"layers": 2, "experts": 4, "graph_modules": ("attn", "moe_router")}
LISTED = {"options": {"moe_layer_freq": [1, 1]}}
ATTENTION, SCALE = "self_attention.core_attention", "main_loss_backward_scale"
BEFORE, AFTER = 2, 3
"""Steps before and after a change."""
Act = Callable[[Any], list[Any]]
"""Trains on with what is captured; the numbers of its steps."""


def to(place: str, value: Any) -> Callable[[Any], object]:
    """Sets this attribute of a layer."""
    of, _, name = place.rpartition(".")
    return lambda layer: setattr(attrgetter(of)(layer) if of else layer, name, value)


def method(layer: Any) -> None:
    layer.mlp.bias_act_func = layer.mlp.forward
    layer.mlp._load_from_state_dict = lambda *_args: None
    layer._forward_mlp = lambda *args, _own=layer._forward_mlp, **kwargs: _own(*args, **kwargs) * 2


def changing(change: Callable[[Any], object]) -> Act:
    def act(trainer: Any) -> list[Any]:
        numbers = [trainer.step() for _ in range(BEFORE)]
        for layer in layers_of(trainer):
            change(layer)
        numbers += [trainer.step() for _ in range(AFTER)]
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        GAIN[:] = [1.0]
        return numbers

    return act


def scheduled(trainer: Any) -> list[Any]:
    """In the fourth pass, and in all of the fourth step, the scale is another, and put back."""
    attentions = [layer.self_attention.core_attention for layer in layers_of(trainer)]
    own, passes = attentions[0].softmax_scale, count()

    def set_scale(scale: float) -> None:
        for attention in attentions:
            attention.softmax_scale = scale

    def begin(*_: Any) -> None:
        set_scale(0.1 if next(passes) in (3, 6, 7) else own)

    trainer.plan = replace(trainer.plan, microbatches=2)
    trainer.model.register_forward_pre_hook(begin)
    trainer.model.register_forward_hook(lambda *_: set_scale(own))
    return [trainer.step() for _ in range(5)]


def halved(old: Callable[..., Any]) -> Callable[..., Any]:
    def function(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = old(self, *args, **kwargs)
        return output * 0.5, bias

    return function


def of_class(trainer: Any) -> list[Any]:
    numbers = [trainer.step()]
    with patch.object(MLP, "forward", halved(MLP.forward)):
        numbers.append(trainer.step())
    assert numbers[0] != numbers[1]
    return [*numbers, trainer.step()]


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


def after_an_error(trainer: Any) -> list[Any]:
    """Behind a router, which leaves nothing for the next pass."""

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    raising = layers_of(trainer)[1].mlp.experts.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        trainer.step()
    raising.remove()
    return [evaluate(trainer), trainer.step()]


GAIN = [1.0]
PATCHED = "what a method reads that was put into a class of Megatron"


def activated(x: torch.Tensor) -> torch.Tensor:
    return relu(x) * GAIN[0]


class Activation:
    gain = 1.0

    def __call__(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return relu(x) ** power * self.gain


@wraps(MLP.forward)  # It then has Megatron's name.
def gained(self: Any, *args: Any, _own: Any = MLP.forward, **kwargs: Any) -> Any:
    output, bias = _own(self, *args, **kwargs)
    return output * GAIN[0], bias


class Scaled(TransformerLayer):  # type: ignore[misc]
    """A user's layer, with parts of its own in what is captured."""

    factor = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began = 0.5

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        assert self.mlp.forward  # A replay replaces the layer's own.
        return super()._forward_mlp(*args, **kwargs) * self.factor


class Patched(Scaled):
    """With a method of its own, and a number under a name that its code computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind, self.wide_factor, self.current_microbatch = "wide", 1.0, 0
        attend(self, 1.0)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward_mlp(*args, **kwargs) * getattr(self, f"{self.kind}_factor")


def attend(layer: Any, factor: float) -> None:
    def attention(*args: Any, _own: Any = layer._forward_attention, **kwargs: Any) -> Any:
        hidden, *others = _own(*args, **kwargs)
        return hidden * factor, *others

    layer._forward_attention = attention


def dispatched(layer: Any) -> None:
    own = layer.mlp.token_dispatcher.dispatch_preprocess
    layer.mlp.token_dispatcher.dispatch_preprocess = lambda x, m, p: own(x, m, p * 0.5)


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "scale": (DENSE, to(f"{ATTENTION}.softmax_scale", 0.1)),
    "dropout": (DENSE | {"dropout": 0.1}, to(f"{ATTENTION}.attention_dropout.p", 0.5)),
    "function": (DENSE, to("mlp.activation_func", relu)),
    "what an own function reads": (
        DENSE | {"options": {"activation_func": activated}},
        lambda _: GAIN.__setitem__(0, 0.5),
    ),
    "what an own callable reads": (
        DENSE | {"options": {"activation_func": Activation()}},
        to("config.activation_func.gain", 0.5),
    ),
    "what a partial method reads": (
        DENSE | {"options": {"activation_func": partial(Activation().__call__, power=2)}},
        to("config.activation_func.func.__self__.gain", 0.5),
    ),
    PATCHED: (DENSE, lambda _: GAIN.__setitem__(0, 0.5)),
    "config": (DENSE, to("config.activation_func", relu)),
    "none": (DENSE, to(f"{ATTENTION}.scale_mask_softmax.scale", 0.5)),
    "none to a tuple": (DENSE, to(f"{ATTENTION}.scale_mask_softmax.window_size", (2, 0))),
    "none to what counts": (DENSE, to("mlp.linear_fc1.grad_output_buffer", 0)),
    "dropout from 0": (DENSE | {"dropout": 0}, to(f"{ATTENTION}.attention_dropout.p", 0.5)),
    "own config": (DENSE, lambda layer: setattr(layer.mlp, "config", copy(layer.config))),
    "none to a tensor": (MOE, to("mlp.router.bias", torch.tensor([1.0, 0.0, 0.0, 0.0]))),
    "enum": (DENSE, to(f"{ATTENTION}.attn_mask_type", AttnMaskType.no_mask)),
    "method": (DENSE, method),
    "method of a dispatcher": (
        MOE | {"graph_modules": ("attn", "moe_router", "moe_preprocess")},
        dispatched,
    ),
    "coefficient": (MOE, to("config.moe_aux_loss_coeff", 1.0)),
    "list in place": (MOE | LISTED, lambda layer: layer.config.moe_layer_freq.append(1)),
    "hook": (
        MOE,
        lambda layer: layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.0,)),
    ),
    "loss scale": (MOE, lambda _: setattr(MoEAuxLossAutoScaler, SCALE, torch.full((1,), 3.0))),
    "compiled": (DENSE, lambda layer: layer.mlp.compile(backend="eager")),
    "bias rate": (MOE, to("config.moe_router_bias_update_rate", 0.1)),
    "nothing": (DENSE, lambda _layer: None),
}
"""The model, and what is changed on each layer before a step, for good."""
OWN: dict[str, tuple[type, Callable[[Any], object]]] = {
    "own layer's setting": (Scaled, to("hidden_dropout", 0.5)),
    "what an own layer reads": (Scaled, to("factor", 2)),
    "what nothing of an own layer reads": (Scaled, to("began", 1.5)),
    "what an own layer reads by a computed name": (Patched, to("wide_factor", 2.0)),
    "an own layer's method, again": (Patched, lambda layer: attend(layer, 0.5)),
    "what schedules set on own layers": (Patched, to("current_microbatch", 1)),
    "what Megatron-FSDP sets on own layers": (Patched, to("_phase", 1)),
}
"""The class of the layers, and what is changed on each."""
ALL = CHANGES | {name: (DENSE, change) for name, (_, change) in OWN.items()}
UNSEEN = {"bias rate", "none to what counts", "nothing", "what nothing of an own layer reads"}
UNSEEN |= {"what schedules set on own layers", "what Megatron-FSDP sets on own layers"}
"""Of them, those that a layer does not read."""
CASES: dict[str, tuple[dict[str, Any], Act, dict[str, int]]] = {
    **{
        name: (shape, changing(change), {"mismatched": 2 * AFTER * (name not in UNSEEN)})
        for name, (shape, change) in ALL.items()
    },
    "for one pass": (DENSE, scheduled, {"mismatched": 2 * 3}),
    "a method of a class, while it is replaced": (DENSE, of_class, {"replayed": 2 * 2}),
    "hooks that change saved tensors": (DENSE, with_saved, {"mismatched": 2}),
    "after an error": (MOE, after_an_error, {}),
}
"""The model, what happens, and counts of it."""


def all_cases() -> dict[str, Any]:
    found = dict[str, Any]()
    for name, (shape, act, _) in CASES.items():
        kind, _ = OWN.get(name, (TransformerLayer, None))
        forward = patch.object(MLP, "forward", gained if name == PATCHED else MLP.forward)
        with patch.object(gpt_layer_specs, "TransformerLayer", kind), forward:
            found[name] = compared(act, CpuModelConfig(**shape))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (alone,) = on_ranks(all_cases, 1)
    made: dict[str, Any] = alone
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_on_a_layer_is_trained_eagerly_as_long_as_it_is(
    name: str, found: dict[str, Any]
) -> None:
    eager, graphed, counts = found[name]
    assert graphed == eager and counts | CASES[name][2] == counts


def test_settings_of_megatrons_modules_count_in_plain_units_too(one_rank: None) -> None:
    with trainer_of(CpuModelConfig(**DENSE), graphs=False) as trainer:
        mlp = layers_of(trainer)[0].mlp
        unit = Unit("mlp", mlp, (mlp,))
        unit.is_plain_module = True
        settings = settings_of([unit])
        assert settings.broken() is None
        mlp.activation_func = relu
        assert "activation_func of mlp" in str(settings.broken())


def test_losses_of_routers_are_summed_as_before_a_capture_and_in_place(one_rank: None) -> None:
    moe_logging.destroy_moe_metrics_tracker()
    with trainer_of(CpuModelConfig(**MOE), graphs=True) as trainer:
        trainer.step()
        metric = moe_logging.get_moe_metrics_tracker().metrics["load_balancing_loss"]
        before = metric.values.clone()
        trainer.capture(TapeBackend())
        assert metric.values.equal(before) and before.any()
        router = layers_of(trainer)[0].mlp.router
        unit = Unit("router", router, (router,))
        table = Objects(unit.entries(), ())
        assert table.broken() is None and not [*Unit("norm", nn.Identity(), ()).entries()]
        metric.values = before
        assert "the tensor of the MoE metric load_balancing_loss" in str(table.broken())


def test_the_phase_of_a_module_under_v2_is_no_setting(one_rank: None) -> None:
    network: Any = sharded.under_v2(mesh=(1,), inside=True)(sharded.Network((16,)))
    part, found = network.layers[0].up, list[Any]()
    settings = settings_of([Unit("unit", part, (part,))])
    part.register_forward_pre_hook(lambda *_: found.append(settings.broken()))
    network(torch.arange(4).view(2, 2))
    assert found == [None]


def test_random_states_that_are_set_go_to_the_generators_of_graphs(one_rank: None) -> None:
    own, other = torch.Generator(), torch.Generator().manual_seed(2)
    with trainer_of(CpuModelConfig(layers=1), graphs=True) as trainer:
        trainer.step()
        tracker = get_cuda_rng_tracker()
        tracker.states_["own"] = own
        trainer.capture(TapeBackend())
        tracker.set_states({**tracker.states_, "own": other})
        trainer.step()
        assert tracker.states_["own"] is own and own.initial_seed() == 2


@pytest.mark.parametrize("shape", [DENSE, DENSE | {"graph_modules": ("attn",)}, MOE])
def test_a_layer_with_a_forward_of_its_own_is_refused(shape: Any, one_rank: None) -> None:
    own = "layer 1: somebody has replaced forward"
    words = "replaced forward of a MoELayer" if shape is MOE else own
    with microbatch_of(2), trainer_of(CpuModelConfig(**shape)) as trainer:
        layer = layers_of(trainer)[1]
        kind = type(layer)
        layer.__class__ = type("Own", (kind,), {"forward": kind.forward})
        with pytest.raises(HookError, match="layer 1: Own defines a forward"):
            helper_of(trainer, TapeBackend())
        layer.__class__ = kind
        replaced = layer.mlp if shape is MOE else layer
        replaced.forward = lambda *a, _own=replaced.forward, **k: _own(*a, **k)
        with pytest.raises(HookError, match=words):
            helper_of(trainer, TapeBackend()).capture()
