"""A view of a model's config with its own ``cuda_graph_modules``.

All layers of a Megatron model share one ``TransformerConfig``. At capture and at replay, the layer
(``transformer_layer.py``) and its ``MoELayer`` (``moe_utils.py``,
``maybe_skip_or_early_return_by_cudagraph``) read from it what a graph covers; megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LayerConfig:
    """``config`` with other ``cuda_graph_modules``; all other fields are those of ``config``."""

    def __init__(self, config: Any, modules: Sequence[Any]) -> None:
        vars(self)["_config"] = config
        vars(self)["cuda_graph_modules"] = list(modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the model's config, not this view."""
        return vars(self)["_config"].__reduce_ex__(protocol)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The config's class, since Megatron asks ``isinstance(config, TransformerConfig)``."""
        return type(vars(self)["_config"])
