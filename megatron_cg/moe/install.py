"""Puts the grouped GEMM and the dispatcher where Megatron and Transformer Engine look them up.

Note [Grouped GEMMs]
    Transformer Engine launches a GEMM for each expert, by counts on the host. Torch has one kernel
    for all experts, with counts on the device. So has cuBLASLt, for which Transformer Engine has a
    setting. Their bits differ where cuBLASLt splits the sum of a GEMM with few rows and a long
    inner dimension. So both are used in all passes, captured or not: then passes agree.
    FP8 needs each expert's rows to be a multiple of some number. Megatron pads them by counts on
    the host; in a capture the dispatcher leaves rows free for it. In ``blockwise`` Megatron pads
    to 16 and cuBLASLt's kernel needs 128, so eager passes keep a GEMM for each expert there: all
    compared shapes had the same bits.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial, wraps
from typing import Any

import torch
from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules
from torch import nn

from megatron_cg.arguments.rules_experts import ROW_MULTIPLES
from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.moe import dispatcher
from megatron_cg.moe.dispatcher import KernelName
from megatron_cg.moe.grouped_gemm import GroupedGemm, on_device
from megatron_cg.moe.row_bound import RowBound
from megatron_cg.moe.slots import PeerMemory
from megatron_cg.upstream.megatron import is_capturing, relax_rules
from megatron_cg.upstream.patch import Undo, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.upstream.te import fp8_recipe, lacks_device_counts

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
_SUPPORTED = Symbol(
    f"{_TE}:is_module_grouped_tensor_path_supported",
    "whether one kernel computes all experts",
    parameters=("recipe", "dtype"),
)
_DISPATCHER = Symbol(
    "megatron.core.transformer.moe.moe_layer:MoEAlltoAllTokenDispatcher",
    "the dispatcher that a layer makes",
)
_PADS = Symbol(
    "megatron.core.transformer.moe.experts:skip_routed_expert_padding",
    "whether experts leave the padding of their rows to others",
    parameters=("config",),
)
_FLAG = "--cg-grouped-gemm"
RELIES_ON = (_GEMM, _LAYER_OF_TE, _SUPPORTED, _DISPATCHER, _PADS)
_in_place: list[KernelName] = []
_lacking = cache(lacks_device_counts)


def use_device_counts(
    bound: RowBound | None = None, *, by_peers: bool = False, gemm: KernelName = "torch"
) -> Undo:
    """Let models built from now on have experts whose token counts stay on the device.

    A model whose config captures whole MoE layers (``moe`` in ``cuda_graph_modules``) without drop
    and pad gets :class:`DeviceDispatcher`, and Megatron's rule against it does not apply.

    ``bound`` is of the rows that these layers exchange; whoever passes one has the steps repeated
    that exceed it. ``by_peers`` exchanges tokens by peer memory, which the layers of a group share.
    ``gemm`` computes the experts of any model; see Note [Grouped GEMMs].

    Returns the undo.

    Raises:
        ConfigurationError: another kernel is in place already.
        UpstreamChangedError: Megatron or Transformer Engine lacks what this replaces, or a function
            that this replaces has another body. Nothing is changed by then.
    """
    theirs, forward = _DISPATCHER.find(), _LAYER_OF_TE.find()
    _GEMM.find()
    for other in {*_in_place} - {gemm}:
        why = f"{other} is in place in this process already"
        raise _refusal(gemm, why, "call megatron_cg.disable() before")
    # Where Transformer Engine is not installed, there are no settings to pass.
    passes = installed_version(_LAYER_OF_TE.distribution)
    for symbol in (*((_LAYER_OF_TE,) if passes else ()), *dispatcher.DISPATCHING):
        symbol.require_known_body()
    # Not by name: after destroy_process_group(), new groups have the names of earlier ones.
    of_group = cache(PeerMemory)

    def make_dispatcher(*args: Any, **named: Any) -> Any:
        config = named.get("config")
        if config is None or not captures_experts(config):
            return theirs(*args, **named)
        made = dispatcher.DeviceDispatcher(*args, **named)
        made.gemm = gemm
        made.multiple = ROW_MULTIPLES.get(config.fp8_recipe, 1) if config.fp8 else 1
        if bound is not None:
            bound.place()
            made.bound = bound
        if by_peers and made.ep_size > 1:
            made.transport = of_group(made.ep_group)
        return made

    with ExitStack() as undo:
        if gemm == "torch":
            undo.callback(set_attribute(sys.modules[_TE], "_GroupedLinear", GroupedGemm))
        else:
            undo.callback(put_over(*_LAYER_OF_TE.place(), _by_one_kernel(forward)))
            undo.callback(put_over(*_PADS.place(), _unpadded_in_captures(_PADS.find())))
        _in_place.append(gemm)
        undo.callback(partial(_in_place.remove, gemm))
        undo.callback(put_over(*_DISPATCHER.place(), make_dispatcher))
        undo.callback(allow_dropless_experts())
        return undo.pop_all().close


def _by_one_kernel(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``GroupedLinear.forward`` by cuBLASLt's kernel; see Note [Grouped GEMMs]."""

    @wraps(forward)
    def by_one_kernel(self: Any, inp: Any, m_splits: Any, *rest: Any, **named: Any) -> Any:
        recipe, counts = fp8_recipe(), m_splits
        if inp.is_cuda:
            _refuse_other(recipe, inp.dtype)
        if not getattr(counts, "is_cuda", False):
            if recipe is not None and recipe.float8_block_scaling():
                return forward(self, inp, m_splits, *rest, **named)
            counts = torch.as_tensor(counts, dtype=torch.int64, device="cpu")
            counts = on_device(counts, inp.device)
        before, self.use_grouped_tensor = self.use_grouped_tensor, True
        try:
            return forward(self, inp, counts, *rest, **named)
        finally:
            self.use_grouped_tensor = before

    return by_one_kernel


def _refuse_other(recipe: Any, dtype: torch.dtype) -> None:
    """Raise ConfigurationError where Transformer Engine would compute otherwise without a word."""
    lacks = _lacking()
    if not lacks and not _SUPPORTED.find()(recipe, dtype):
        kind = "" if recipe is None else f" and {type(recipe).__name__}"
        lacks = f"Transformer Engine has no such kernel for {dtype}{kind}"
    if lacks:
        remedy = f"use {_FLAG} torch (BF16) or te, or enable() without grouped_gemm"
        raise _refusal("cublas", lacks, remedy)


def _refusal(gemm: str, why: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Violation("grouped-gemm", f"{_FLAG} {gemm}", why, remedy)])


def _unpadded_in_captures(skips: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether the dispatcher pads an expert's rows, or Megatron's ``skips`` says so."""

    @wraps(skips)
    def skips_padding(config: Any) -> bool:
        return (is_capturing() and captures_experts(config)) or skips(config)

    return skips_padding


def grouped_gemm_of(model: nn.Module) -> KernelName | None:
    return next((made.gemm for made in _dispatchers(model)), None)


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
    # One rule demands drop and pad of whole MoE layers.
    return relax_rules(
        captures_experts,
        moe_expert_capacity_factor=(1.0, None),
        moe_pad_expert_input_to_capacity=(True, False),
    )
