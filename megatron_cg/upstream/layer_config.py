"""A view of a model's config with ``cuda_graph_modules`` of its own.

All layers of a Megatron model share one ``TransformerConfig``, and what a graph covers is read
from it at capture and at replay: by the layer itself (``transformer_layer.py``) and by its
``MoELayer`` (``moe_utils.py``, ``maybe_skip_or_early_return_by_cudagraph``); megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LayerConfig:
    """``config`` with other ``cuda_graph_modules``; every other field is read and written there."""

    def __init__(self, config: Any, modules: Sequence[Any]) -> None:
        vars(self)["_config"] = config
        vars(self)["cuda_graph_modules"] = list(modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the model's config."""
        return vars(self)["_config"].__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The config's class, since Megatron asks ``isinstance(config, TransformerConfig)``."""
        return type(vars(self)["_config"])
