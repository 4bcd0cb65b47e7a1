"""Layers of multi-token prediction that run several times in a pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_cg.arguments.fast_path_parts import chosen_parts
from megatron_cg.arguments.schema import prediction_is_repeated, recomputes_layers
from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "megatron-core",
        "megatron.core.transformer.transformer_config:TransformerConfig",
        "the model's config",
        attributes=("mtp_num_layers", "mtp_use_repeated_layer"),
    ),
)


def parts_for(config: Any, fast_path: bool | Collection[str]) -> frozenset[str]:
    """The parts of ``fast_path`` that a model with such a layer can do with.

    With full recompute Megatron puts a reentrant checkpoint around each run of the layer. The runs
    then end one by one in the backward pass, and each has gradients of its grouped GEMMs' weights.
    Weights detached from autograd get gradients once in a backward pass.
    """
    chosen = chosen_parts(fast_path)
    if prediction_is_repeated(config) and recomputes_layers(config):
        return chosen - {"detached-weights"}
    return chosen
