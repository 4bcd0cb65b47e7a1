"""What can go wrong between capture and replay, done to a real model on the tape.

Each fault is put into an eager run and into one with graphs, at the same step; the guard's clause
of the same name has to see it. ``SWITCHED_OFF`` takes single clauses out of the guard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guard import inputs as inputs_module
from megatron_cg.replay.guard.addresses import Addresses
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guard.modes import Autocast, Autograd, Frozen, Numerics, Training
from megatron_cg.replay.guard.objects import Hooks, Objects
from megatron_cg.replay.guard.routing import Routing

Fault = Callable[[Any], Any]
"""Does its worst to a trainer; may return a context manager for the next step."""


def layer_of(trainer: Any) -> Any:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    return transformer_layers(trainer.model)[0]


def with_keyword(name: str, change: Callable[[Any], Any]) -> Fault:
    """The layer is called with another value of a keyword."""

    def fault(trainer: Any) -> None:
        def hook(_module: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, name: change(kwargs.get(name))}

        layer_of(trainer).register_forward_pre_hook(hook, with_kwargs=True)

    return fault


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, other strides."""
    return tensor.transpose(0, 3).contiguous().transpose(0, 3)


def in_evaluation(trainer: Any) -> None:
    layer_of(trainer).self_attention.eval()


def without_gradients(trainer: Any) -> Any:
    step = trainer.step

    def forward_only() -> tuple[float, float]:
        trainer.step = step
        with torch.no_grad():
            return float(trainer._forward().sum()), 0.0

    trainer.step = forward_only
    return nullcontext()


def under_autocast(_trainer: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


def module_replaced(trainer: Any) -> None:
    attention = layer_of(trainer).self_attention
    attention.core_attention = copy.copy(attention.core_attention)
    attention.core_attention.softmax_scale = 0.5


def parameter_replaced(trainer: Any) -> None:
    """For the layer's forward pass: between steps Megatron-FSDP would put its own back."""
    norm = layer_of(trainer).input_layernorm
    new, own = nn.Parameter(torch.full((norm.weight.numel(),), 1.5)), []

    def before(*_args: Any) -> None:
        own.append(norm.weight)
        norm.weight = new

    def after(*_args: Any) -> None:
        norm.weight = own.pop()

    layer_of(trainer).register_forward_pre_hook(before)
    layer_of(trainer).register_forward_hook(after, prepend=True)


def buffer_replaced(trainer: Any) -> None:
    attention = layer_of(trainer).self_attention
    attention.mark = torch.ones(2)


def attribute_replaced(trainer: Any) -> None:
    layer_of(trainer).self_attention.note = torch.ones(2)


def forward_replaced(trainer: Any) -> None:
    mlp = layer_of(trainer).mlp
    old = mlp.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, bias = old(*args, **kwargs)
        return output * 2, bias

    mlp.forward = doubled


def hook_added(trainer: Any) -> None:
    layer_of(trainer).mlp.register_forward_hook(lambda _m, _i, out: (out[0] * 2, out[1]))


def metrics_replaced(_trainer: Any) -> None:
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()


def choice_repeated(trainer: Any) -> None:
    """From now on the first router sends all tokens to the same experts."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay = layer_of(trainer).mlp.router.router_replay
    plan = trainer.plan
    tokens = plan.micro_batch_size * plan.model.sequence_length
    replay.set_target_indices(torch.tensor([[0, 1]]).repeat(tokens, 1))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def memory_moved(trainer: Any) -> None:
    buffer = layer_of(trainer).self_attention.mark
    buffer.data = buffer.data.clone()


def recipe_changed(trainer: Any) -> None:
    trainer.backend.recipe = "tensorwise"


@dataclass(frozen=True)
class Case:
    """A fault, and what the model needs for it."""

    fault: Fault
    scopes: tuple[str, ...] = ("attn", "mlp")
    experts: int = 0
    warmup: int = 1
    """Steps before capture; with two, the rotary table is found to be one tensor in all steps."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of Megatron's TransformerConfig."""


FAULTS: dict[str, Case] = {
    "structure": Case(with_keyword("sequence_len_offset", lambda _old: torch.zeros(2))),
    "object": Case(with_keyword("sequence_len_offset", lambda _old: 0)),
    "shape": Case(with_keyword("attention_mask", lambda old: old.repeat(2, 1, 1, 1))),
    "dtype": Case(with_keyword("rotary_pos_emb", lambda old: old.double())),
    "stride": Case(with_keyword("rotary_pos_emb", strided)),
    "requires_grad": Case(with_keyword("rotary_pos_emb", lambda old: old.clone().requires_grad_())),
    "static input": Case(with_keyword("rotary_pos_emb", torch.clone), warmup=2),
    "training": Case(in_evaluation),
    "grad mode": Case(without_gradients),
    "autocast": Case(under_autocast),
    "fp8": Case(recipe_changed),
    "routing": Case(
        choice_repeated,
        ("attn", "moe_router"),
        4,
        options={"moe_enable_routing_replay": True},
    ),
    "module": Case(module_replaced),
    "parameter": Case(parameter_replaced),
    "buffer": Case(buffer_replaced),
    "attribute": Case(attribute_replaced),
    "forward": Case(forward_replaced),
    "hooks": Case(hook_added),
    "metrics": Case(metrics_replaced, ("attn", "moe_router"), 4),
    "address": Case(memory_moved),
}
"""By the clause that has to see it. ``device`` has no place on one CPU; see test_inputs.py.
Megatron-FSDP fails when a parameter is frozen or unfrozen after wrapping; for ``frozen`` see
test_frozen.py."""


def _nothing(*_args: Any, **_kwargs: Any) -> Mismatch | None:
    return None


@contextmanager
def switched_off(clause: str) -> Iterator[None]:
    """The guard without one of its clauses."""
    from megatron_cg.replay import attach as replay

    whole = {
        "structure": (Inputs, "_structure"),
        "requires_grad": (Inputs, "_gradients"),
        "static input": (Inputs, "_borrowed"),
        "training": (Training, "broken"),
        "frozen": (Frozen, "broken"),
        "grad mode": (Autograd, "broken"),
        "autocast": (Autocast, "broken"),
        "fp8": (Numerics, "broken"),
        "hooks": (Hooks, "broken"),
        "routing": (Routing, "broken"),
        "object": (replay, "_no_tensor"),
    }
    with pytest.MonkeyPatch.context() as patch:
        if clause in whole:
            patch.setattr(*whole[clause], _nothing)
        elif clause == "address":
            broken = Addresses.broken

            def in_backward(self: Addresses, *, forward: bool) -> Mismatch | None:
                return None if forward else broken(self, forward=False)

            patch.setattr(Addresses, "broken", in_backward)
        elif clause in inputs_module.FIELDS:
            read, index = inputs_module.fields, inputs_module.FIELDS.index(clause)

            def but_one(tensor: torch.Tensor) -> tuple[Any, ...]:
                return tuple(None if at == index else v for at, v in enumerate(read(tensor)))

            patch.setattr(inputs_module, "fields", but_one)
        else:
            init = Objects.__init__

            def without(self: Any, table: Any) -> None:
                init(self, [entry for entry in table if entry[2] != clause])

            patch.setattr(Objects, "__init__", without)
        yield
