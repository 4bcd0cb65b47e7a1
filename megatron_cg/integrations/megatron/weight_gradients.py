"""Layers that hand over their weight gradients, although gradient-accumulation fusion is on.

With the fusion a layer's GEMM writes a weight's gradient into Megatron-FSDP's bucket and says so
from Python (``weight.grad_added_to_main_grad``; transformer-engine 2.20.2, ``module/linear.py``). A
replay runs no Python, so Megatron-FSDP would copy the placeholder that the graph returns over the
gradient.

Note [The same bits]
    While graphs live, these layers compute as without the fusion, in eager passes too. If gradients
    are sharded, a fused GEMM overwrites the bucket (``overwrite_main_grad``), and microbatches are
    added when it is reduced. So it is the same GEMM, and what it writes is copied as it is, if the
    bucket has the gradients' dtype. ``arguments/rules_fsdp.py`` refuses other settings.
    Megatron's own layers write into the bucket by another GEMM than without the fusion, so those
    outside of graphs, such as the output layer, keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from megatron_cg.upstream.patch import all_of, set_attribute
from megatron_cg.upstream.symbols import Symbol

_OF_TE, _OF_MEGATRON = "fuse_wgrad_accumulation", "gradient_accumulation_fusion"
_PLACES = {
    "transformer_engine.pytorch.module.linear:Linear": _OF_TE,
    "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear": _OF_TE,
    "transformer_engine.pytorch.module.layernorm_mlp:LayerNormMLP": _OF_TE,
    "transformer_engine.pytorch.module.grouped_linear:GroupedLinear": _OF_TE,
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear": _OF_MEGATRON,
    "megatron.core.tensor_parallel.layers:RowParallelLinear": _OF_MEGATRON,
}
RELIES_ON = tuple(
    Symbol(
        "transformer-engine" if name == _OF_TE else "megatron-core",
        path,
        "a layer that reads its setting in each forward pass",
        attributes=(name,),
    )
    for path, name in _PLACES.items()
)


def weight_gradients_returned(model: nn.Module, layers: Sequence[nn.Module]) -> Callable[[], None]:
    """Turn the fusion off in Transformer Engine's layers of ``model`` and in all of ``layers``.

    Called between two steps. Returns the undo.
    """
    graphed = {module for layer in layers for module in layer.modules()}
    return all_of(
        set_attribute(module, name, False)
        for module in model.modules()
        for name in (_OF_TE, _OF_MEGATRON)
        if vars(module).get(name) and (name == _OF_TE or module in graphed)
    )
