"""Sample inputs in the dtype that layers are called with.

``GraphableMegatronModule.get_layer_static_inputs`` makes hidden states in bfloat16 whatever the
model's dtype. With ``fp32_residual_connection``, ``LanguageModelEmbedding.forward`` and each layer
return hidden states in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "megatron-core",
        "megatron.core.transformer.module:GraphableMegatronModule.get_layer_static_inputs",
        "where Megatron makes hidden states for graphs",
    ),
)
for _symbol in RELIES_ON:
    _symbol.find()


def hidden_type(config: Any) -> torch.dtype:
    """The dtype of the hidden states between the layers of a model with that config."""
    kind: torch.dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
    return kind


def in_type(
    samples: Sequence[tuple[torch.Tensor, ...]], dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Positional sample inputs (s, b, h) in ``dtype``; samples that shared a tensor still do."""
    given = {id(tensor): tensor for args in samples for tensor in args}
    made = {
        key: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        for key, tensor in given.items()
    }
    return [tuple(made[id(tensor)] for tensor in args) for args in samples]
