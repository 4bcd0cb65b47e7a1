"""Puts the grouped GEMM and the dispatcher where Megatron and Transformer Engine look them up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules
from torch import nn

from megatron_cg.moe import dispatcher
from megatron_cg.moe.grouped_gemm import GroupedGemm
from megatron_cg.moe.peer_memory import PeerMemory
from megatron_cg.moe.row_bound import RowBound
from megatron_cg.upstream.megatron import relax_rules
from megatron_cg.upstream.patch import Undo, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol, installed_version

_TE = "transformer_engine.pytorch.module.grouped_linear"
_GEMM = Symbol(
    f"{_TE}:_GroupedLinear.forward",
    "a grouped GEMM",
    parameters=(
        *("ctx", "inp", "m_splits", "non_tensor_args", "out", "dgrad_out"),
        "weights_and_biases",
    ),
)
_LAYER_OF_TE = Symbol(
    f"{_TE}:GroupedLinear.forward",
    "what passes settings to the grouped GEMM",
    fingerprints=("2fdb193f2bdd91b2",),
)
_DISPATCHER = Symbol(
    "megatron.core.transformer.moe.moe_layer:MoEAlltoAllTokenDispatcher",
    "the dispatcher that a layer makes",
)
RELIES_ON = (_GEMM, _LAYER_OF_TE, _DISPATCHER)


def use_device_counts(bound: RowBound | None = None, *, by_peers: bool = False) -> Undo:
    """Let models built from now on have experts whose token counts stay on the device.

    Experts compute by :class:`GroupedGemm`. A model whose config captures whole MoE layers (``moe``
    in ``cuda_graph_modules``) without drop and pad gets :class:`DeviceDispatcher`, and Megatron's
    rule against it does not apply.

    Args:
        bound: bounds the rows that these layers exchange. Whoever passes one has the steps repeated
            that exceed it.
        by_peers: exchange tokens by peer memory, which the layers of an expert-parallel group
            share.

    Returns:
        The undo.

    Raises:
        UpstreamChangedError: Megatron or Transformer Engine lacks what this replaces, or a function
            that this replaces has another body. Then nothing is changed.
    """
    _GEMM.find()
    theirs = _DISPATCHER.find()
    # On the CPU the stand-in for Transformer Engine has no settings to pass.
    of_te = (_LAYER_OF_TE,) if installed_version(_LAYER_OF_TE.distribution) else ()
    for symbol in (*of_te, *dispatcher.DISPATCHING):
        symbol.require_known_body()
    # Not by name: after destroy_process_group(), new groups have the names of earlier ones.
    of_group = cache(PeerMemory)

    def make_dispatcher(*args: Any, **named: Any) -> Any:
        if not captures_experts(named["config"]):
            return theirs(*args, **named)
        made = dispatcher.DeviceDispatcher(*args, **named)
        if bound is not None:
            bound.place()
            made.bound = bound
        if by_peers and made.ep_size > 1:
            made.transport = of_group(made.ep_group)
        return made

    with ExitStack() as undo:
        undo.callback(set_attribute(sys.modules[_TE], "_GroupedLinear", GroupedGemm))
        undo.callback(put_over(*_DISPATCHER.place(), make_dispatcher))
        undo.callback(allow_dropless_experts())
        return undo.pop_all().close


def counts_on_device(model: nn.Module) -> bool:
    """Whether a layer of the model dispatches tokens by counts on the device."""
    return any(_dispatchers(model))


def bound_of(model: nn.Module) -> RowBound | None:
    """The bound of rows that the model was built with; None if its graphs have room for all."""
    return next((made.bound for made in _dispatchers(model) if made.bound is not None), None)


def peer_memory_of(model: nn.Module) -> PeerMemory | None:
    """What the model's layers, all of one group, exchange tokens by; None if by collectives."""
    transports = (made.transport for made in _dispatchers(model))
    return next((way for way in transports if isinstance(way, PeerMemory)), None)


def _dispatchers(model: nn.Module) -> Iterator[dispatcher.DeviceDispatcher]:
    made = (getattr(module, "token_dispatcher", None) for module in model.modules())
    return (ours for ours in made if isinstance(ours, dispatcher.DeviceDispatcher))


def captures_experts(config: Any) -> bool:
    """Whether graphs of this model hold dropless experts; Megatron may not have read its config."""
    given = config.cuda_graph_scope
    if given is None:
        given = config.cuda_graph_modules
    named = [getattr(scope, "name", scope) for scope in given] if isinstance(given, list) else given
    capacity = config.moe_expert_capacity_factor
    if config.cuda_graph_impl != "transformer_engine" or not config.num_moe_experts:
        return False
    modules, _, _ = normalize_cuda_graph_modules(named)
    return (
        (not modules or any(module.name == "moe" for module in modules))
        and (capacity is None or capacity < 0)
        and not config.moe_pad_expert_input_to_capacity
    )


def allow_dropless_experts() -> Undo:
    """Let configs that are made from now on capture whole MoE layers; returns the undo."""
    return relax_rules(_check)


def _check(config: Any, rules: Callable[[Any], None]) -> None:
    """Megatron's rules of a model, without the one that whole MoE layers need drop and pad."""
    if not captures_experts(config):
        rules(config)
        return
    config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity = 1.0, True
    try:
        rules(config)
    finally:
        config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity = None, False
