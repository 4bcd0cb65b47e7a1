"""Which parts of each decoder layer are captured, which stay eager, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_cg.arguments import RunArguments
from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.layout import available_scopes
from megatron_cg.arguments.schema import WHOLE_LAYER

_SHARED = "shared expert"
_PARTS = {
    "self_attention": ("attention", "attn"),
    "mixer": ("Mamba mixer", "mamba"),
    "mlp": ("MLP", "mlp"),
    "mlp.router": ("router", "moe_router"),
    "mlp.shared_experts": (_SHARED, "moe_router"),
    "mlp.experts": ("experts", "moe"),
}
"""Parts of a layer by the path of their module: their name, and their scope."""

_DISPATCH = ("token dispatch", "moe_preprocess")
_FIXED = "--cg-grouped-gemm torch, or if each expert drops and pads to a capacity"


def describe_layers(
    run: RunArguments, selection: LayerSelection, layers: Sequence[nn.Module]
) -> list[dict[str, Any]]:
    """The kind of each layer, its scopes, its captured parts, and its eager parts with reasons."""
    available = available_scopes(run)
    count = len(layers)
    found = []
    for index, layer in enumerate(layers):
        active = selection.scopes(index, count, run.cuda_graph_modules)
        here = _parts_of(layer, run)
        exists = available[index] if available is not None else None
        used = [s for s in active if exists is None or s in exists]
        captured = [name for name, scope in here if _is_captured(scope, used, run)]
        eager = [
            {"part": name, "reason": _reason(name, scope, index, run, active)}
            for name, scope in here
            if name not in captured
        ]
        found.append(
            {
                "index": index,
                "kind": " + ".join(_kinds(here)),
                "scopes": used if captured else [],
                "captured": captured,
                "eager": eager,
            }
        )
    return found


def _parts_of(layer: nn.Module, run: RunArguments) -> list[tuple[str, str]]:
    modules = dict(layer.named_modules())
    is_moe = "mlp.experts" in modules
    parts = [
        (name, "moe" if name == _SHARED and run.moe_shared_expert_overlap else scope)
        for path, (name, scope) in _PARTS.items()
        if any(True for _ in getattr(modules.get(path), "parameters", tuple)())
        and not (path == "mlp" and is_moe)
    ]
    return [*parts, _DISPATCH] if is_moe else parts


def _kinds(parts: Sequence[tuple[str, str]]) -> list[str]:
    names = [name for name, _ in parts]
    kinds = [str(name) for name in ("attention", "Mamba mixer", "MLP") if name in names]
    return [*kinds, "MoE"] if "experts" in names else kinds


def _is_captured(scope: str, active: Sequence[str], run: RunArguments) -> bool:
    if WHOLE_LAYER in active or scope in active:
        return True
    return scope in ("moe_router", "moe_preprocess") and "moe" in active


def _reason(name: str, scope: str, index: int, run: RunArguments, active: Sequence[str]) -> str:
    """Why a part is not in its layer's graph; ``active`` are the scopes selected for the layer."""
    asked = WHOLE_LAYER if run.is_whole_layer else scope
    if asked in run.scope_names:
        if asked not in active:
            return f"--cg-layers leaves {asked} out of layer {index}"
        return f"layer {index} has no such scope"
    if name == "experts":
        return f"tokens per expert differ from step to step; moe can capture them with {_FIXED}"
    if name == _SHARED and run.moe_shared_expert_overlap:
        return "it runs beside the exchange of tokens; moe can capture both"
    if name == _DISPATCH[0]:
        return "its counting of tokens can be captured by moe_preprocess; its communication cannot"
    return f"{scope} is not in --cuda-graph-modules"
