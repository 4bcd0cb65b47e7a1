"""Which scopes of each layer are in a graph, and why the others are not.

Megatron's ``_layer_is_graphable`` says whether a layer has any of the scopes of a config. Only
layers have a ``layer_number``, from 1. A layer that is captured with its own scopes sees them in a
view of its config (``upstream/megatron.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.megatron import LayerConfig
from megatron_cg.upstream.symbols import Symbol

NOT_SELECTED = "not selected (--cg-layers)"
NOT_ASKED = "not asked for (--cuda-graph-modules)"
NO_SUCH_PART = "the layer has no such part"

_TRANSFORMER = "megatron.core.transformer"
_LAYER = Symbol(
    "megatron-core", f"{_TRANSFORMER}.module:GraphableMegatronModule", "layers that have scopes"
)
_GRAPHABLE = Symbol(
    "megatron-core",
    f"{_TRANSFORMER}.cuda_graphs:_layer_is_graphable",
    "which layers have a scope",
    parameters=("layer", "config"),
)
_SCOPES = Symbol("megatron-core", f"{_TRANSFORMER}.enums:CudaGraphModule", "the scopes by name")
RELIES_ON = (_LAYER, _GRAPHABLE, _SCOPES)


def coverage(model: nn.Module, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row for each layer of ``model``, in order.

    A row has the layer's ``name`` and ``kind`` (its class), ``graphed`` (the scopes in its graph)
    and ``eager`` (the reason for each other scope). Without Megatron's layers the rows are the
    units, each graphed as a whole.
    """
    captured = {unit.layer: unit.name for unit in units}
    layers: list[Any] = []
    if f"{_TRANSFORMER}.cuda_graphs" in sys.modules:
        kind = _LAYER.find()
        layers = [m for m in model.modules() if isinstance(m, kind) and hasattr(m, "layer_number")]
    if not layers:
        return [_row(unit.name, unit.layer, [WHOLE_LAYER], {}) for unit in units]
    return [_megatron_row(layer, captured.get(layer)) for layer in layers]


def _megatron_row(layer: Any, name: str | None) -> dict[str, Any]:
    own = _names(layer.config.cuda_graph_modules) or [WHOLE_LAYER]
    config = vars(layer.config).get("_config", layer.config)
    asked = _names(config.cuda_graph_modules) or [WHOLE_LAYER]
    graphed: list[str] = []
    eager: dict[str, str] = {}
    for scope in asked if asked == [WHOLE_LAYER] else SCOPES:
        if scope != WHOLE_LAYER and not _has(layer, config, scope):
            eager[scope] = NO_SUCH_PART
        elif name is not None and scope in own:
            graphed.append(scope)
        else:
            eager[scope] = NOT_SELECTED if scope in asked else NOT_ASKED
    return _row(name or f"layer {layer.layer_number - 1}", layer, graphed, eager)


def _row(name: str, layer: nn.Module, graphed: list[str], eager: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "kind": type(layer).__name__, "graphed": graphed, "eager": eager}


def _names(modules: Sequence[Any]) -> list[str]:
    return [getattr(module, "name", module) for module in modules or ()]


def _has(layer: Any, config: Any, scope: str) -> bool:
    """Whether ``layer`` has that scope."""
    alone = LayerConfig(config, cuda_graph_modules=[_SCOPES.find()[scope]])
    return bool(_GRAPHABLE.find()(layer, alone))
