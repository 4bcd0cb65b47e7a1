"""Which scopes exist on each decoder layer of a run's model, before the model is built.

From megatron-core 0.19.2: GPT models, ``get_gpt_decoder_layer_specs`` (``moe_layer_freq``); hybrid
models, ``hybrid_layer_allocation.Symbols``; and which of their layers are graphable,
``cuda_graphs._layer_is_graphable``.
"""

from __future__ import annotations

from megatron_cg.arguments.schema import WHOLE_LAYER, RunArguments

_ATTENTION = frozenset({"attn"})
_MOE = frozenset({"moe", "moe_router", "moe_preprocess"})
_DENSE_MLP = frozenset({"mlp"})
_WHOLE = frozenset({WHOLE_LAYER})
_HYBRID = {
    "M": frozenset({"mamba"}),
    "G": _ATTENTION,
    "*": _ATTENTION,
    "D": _ATTENTION,
    "+": _ATTENTION,
    "-": _DENSE_MLP,
    "E": _MOE,
}


def decoder_symbols(pattern: str) -> str:
    """The decoder's letters of a hybrid pattern, without pipeline bars and MTP layers."""
    return pattern.split("/", maxsplit=1)[0].replace("|", "")


def available_scopes(run: RunArguments) -> tuple[frozenset[str], ...] | None:
    """The scopes that each decoder layer could have, or None if they cannot be known.

    They cannot be known if a layer spec or a heterogeneous config decides, if the number of layers
    is not given, or if Megatron does not accept the pattern (it reports that itself).
    """
    if run.hybrid_layer_pattern is not None:
        symbols = decoder_symbols(run.hybrid_layer_pattern)
        if any(symbol not in _HYBRID for symbol in symbols):
            return None
        return tuple(_HYBRID[symbol] | _WHOLE for symbol in symbols)
    if run.custom_layers or run.num_layers is None:
        return None
    expert_layers = _expert_layers(run, run.num_layers)
    if expert_layers is None:
        return None
    return tuple(
        _ATTENTION | (_MOE if is_expert else _DENSE_MLP) | _WHOLE for is_expert in expert_layers
    )


def _expert_layers(run: RunArguments, num_layers: int) -> tuple[bool, ...] | None:
    if not run.num_experts:
        return (False,) * num_layers
    if isinstance(run.moe_layer_freq, int):
        if run.moe_layer_freq < 1:
            return None
        return tuple(index % run.moe_layer_freq == 0 for index in range(num_layers))
    if len(run.moe_layer_freq) != num_layers:
        return None
    return tuple(bool(is_expert) for is_expert in run.moe_layer_freq)
