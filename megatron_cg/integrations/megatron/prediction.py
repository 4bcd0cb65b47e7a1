"""Layers of multi-token prediction that run several times in a pass."""

from __future__ import annotations

from typing import Any

from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "megatron-core",
        "megatron.core.transformer.transformer_config:TransformerConfig",
        "the model's config",
        attributes=("mtp_num_layers", "mtp_use_repeated_layer"),
    ),
)


def prediction_is_repeated(config: Any) -> bool:
    """Whether one layer predicts all further tokens; it then has no graph.

    A graph keeps the activations of one run alone; see Note [Order of replays] in
    ``replay/in_flight.py``.

    Args:
        config: Megatron's ``TransformerConfig``, or its parsed arguments.
    """
    return bool(config.mtp_use_repeated_layer and (config.mtp_num_layers or 0) > 1)
