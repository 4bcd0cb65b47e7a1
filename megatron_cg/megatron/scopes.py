"""Scopes of one layer: a view of the model's config with ``cuda_graph_modules`` of its own.

All layers of a Megatron model share one ``TransformerConfig``, and what a graph covers is read
from it at capture and at replay: by the layer itself (``transformer_layer.py``) and by its
``MoELayer`` (``moe_utils.py``, ``maybe_skip_or_early_return_by_cudagraph``); megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.undo import set_attribute


class LayerConfig:
    """``config`` with other ``cuda_graph_modules``; every other field is read and written there."""

    def __init__(self, config: Any, modules: Sequence[Any]) -> None:
        vars(self)["_config"] = config
        vars(self)["cuda_graph_modules"] = list(modules)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # asked by copy, before there is anything to look at
            raise AttributeError(name)
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The config's class, since Megatron asks ``isinstance(config, TransformerConfig)``."""
        return type(vars(self)["_config"])


def give_scopes(layer: nn.Module, modules: Sequence[Any]) -> Callable[[], None]:
    """Let ``layer`` and its MoE layer, if it has one, see ``modules``; returns the undo."""
    with ExitStack() as undo:
        for owner in (layer, getattr(layer, "mlp", None)):
            config = getattr(owner, "config", None)
            if owner is not None and config is not None:
                undo.callback(set_attribute(owner, "config", LayerConfig(config, modules)))
        return undo.pop_all().close
