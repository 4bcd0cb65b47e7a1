"""Which scopes of each layer are in a graph, and why the others are not.

Megatron's ``_layer_is_graphable`` says whether a layer has any of the scopes of a config. Only
layers have a ``layer_number``, from 1. A layer that is captured with its own scopes sees them in a
view of its config (``upstream/layer_config.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.layer_config import LayerConfig
from megatron_cg.upstream.symbols import Symbol

NOT_SELECTED = "not selected (--cg-layers)"
NOT_ASKED = "not asked for (--cuda-graph-modules)"
NO_SUCH_PART = "the layer has no such part"

_CUDA_GRAPHS = "megatron.core.transformer.cuda_graphs"
_LAYER = Symbol(
    "megatron-core",
    "megatron.core.transformer.module:GraphableMegatronModule",
    "the class of layers that can be captured",
)
_GRAPHABLE = Symbol(
    "megatron-core",
    f"{_CUDA_GRAPHS}:_layer_is_graphable",
    "which layers have a scope",
    parameters=("layer", "config"),
)
_SCOPES = Symbol(
    "megatron-core", "megatron.core.transformer.enums:CudaGraphModule", "the scopes by name"
)
RELIES_ON = (_LAYER, _GRAPHABLE, _SCOPES)


def coverage(model: nn.Module, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row for each layer of ``model``, in order.

    A row has the layer's ``name`` and ``kind`` (its class), ``graphed`` (the scopes in its graph)
    and ``eager`` (the reason for each other scope). Without Megatron's layers the rows are the
    units, each graphed as a whole.
    """
    captured = {unit.layer: unit.name for unit in units}
    layers: list[Any] = []
    if _CUDA_GRAPHS in sys.modules:
        kind = _LAYER.find()
        found = (module for module in model.modules() if isinstance(module, kind))
        layers = [layer for layer in found if hasattr(layer, "layer_number")]
    if not layers:
        return [_row(unit.name, unit.layer, [WHOLE_LAYER], {}) for unit in units]
    return [_megatron_row(layer, captured.get(layer)) for layer in layers]


def _megatron_row(layer: Any, name: str | None) -> dict[str, Any]:
    seen = _names(layer.config.cuda_graph_modules)
    config = vars(layer.config).get("_config", layer.config)
    asked = _names(config.cuda_graph_modules) or [WHOLE_LAYER]
    graphed = [] if name is None else (seen or [WHOLE_LAYER])
    eager: dict[str, str] = {}
    for scope in asked if asked == [WHOLE_LAYER] else SCOPES:
        if scope != WHOLE_LAYER and not _has(layer, config, scope):
            eager[scope] = NO_SUCH_PART
            graphed = [other for other in graphed if other != scope]
        elif scope not in graphed:
            eager[scope] = NOT_SELECTED if scope in asked else NOT_ASKED
    return _row(name or f"layer {layer.layer_number - 1}", layer, graphed, eager)


def _row(name: str, layer: nn.Module, graphed: list[str], eager: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "kind": type(layer).__name__, "graphed": graphed, "eager": eager}


def _names(modules: Sequence[Any]) -> list[str]:
    return [getattr(module, "name", module) for module in modules or ()]


def _has(layer: Any, config: Any, scope: str) -> bool:
    """Whether ``layer`` has that scope."""
    return bool(
        _GRAPHABLE.find()(layer, LayerConfig(config, cuda_graph_modules=[_SCOPES.find()[scope]]))
    )
