"""Scopes of one layer, and the flag that excludes a module from them; megatron-core 0.19.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megatron_cg.upstream.layer_config import LayerConfig
from megatron_cg.upstream.patch import all_of, set_attribute, undone_after


def give_scopes(layer: nn.Module, modules: Sequence[Any]) -> Callable[[], None]:
    """Set ``modules`` as the scopes of ``layer`` and of its MoE layer, if any; returns the undo."""
    return all_of(
        set_attribute(owner, "config", LayerConfig(config, cuda_graph_modules=list(modules)))
        for owner in (layer, getattr(layer, "mlp", None))
        if (config := getattr(owner, "config", None)) is not None
    )


def leave_out(layer: Any, module: nn.Module | None) -> str:
    """The flag to type so that no graph of ``layer`` contains ``module``.

    Args:
        layer: a ``GraphableMegatronModule`` that is captured.
        module: a module below ``layer``; None if it is unknown.
    """
    scopes = list(layer.config.cuda_graph_modules)
    index = layer.layer_number - 1
    if not scopes:
        return (
            "Name the scopes that do not hold it with --cuda-graph-modules, or leave the layer "
            f"out: --cg-layers layer takes ranges without {index}."
        )
    out = {scope for scope in scopes if _holds(scope, layer, module)} or set(scopes)
    by_name = {scope.name: scope for scope in scopes}
    if by_name.get("moe_router") in out and "moe_preprocess" in by_name:
        out.add(by_name["moe_preprocess"])  # Megatron captures it only with the router
    kept = [scope.name for scope in scopes if scope not in out]
    names = [scope.name for scope in scopes if scope in out]
    instead = f"--cuda-graph-modules {' '.join(kept)}" if kept else "--cuda-graph-impl none"
    return (
        f"Type {instead}, without {' and '.join(names)}; or, for this layer alone, --cg-layers "
        f"with ranges of {' and '.join(names)} that leave out {index}."
    )


def _holds(scope: Any, layer: Any, module: nn.Module | None) -> bool:
    """Whether ``scope`` alone captures ``module`` of ``layer``."""
    from megatron.core.transformer.cuda_graphs import _layer_is_graphable

    view = LayerConfig(layer.config, cuda_graph_modules=[scope])
    if not _layer_is_graphable(layer, view):
        return False
    if scope.name == "moe_preprocess":  # not a module, but code of the MoE layer itself
        return module is layer.mlp
    with undone_after(set_attribute(layer, "config", view)):
        covered = layer._get_submodules_under_cudagraphs()
    return any(module is below for root in covered for below in root.modules())
