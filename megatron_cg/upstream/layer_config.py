"""A view of a model's config with some fields of its own.

All modules of a Megatron model share one ``TransformerConfig``. At capture and at replay, the layer
(``transformer_layer.py``) and its ``MoELayer`` (``moe_utils.py``,
``maybe_skip_or_early_return_by_cudagraph``) read ``cuda_graph_modules`` from it, which is what a
graph covers. The block reads ``recompute_granularity`` from it (``transformer_block.py``);
megatron-core 0.19.2.
"""

from __future__ import annotations

from typing import Any


class LayerConfig:
    """``config`` with these ``fields``; all other fields are those of ``config``."""

    def __init__(self, config: Any, **fields: Any) -> None:
        vars(self).update(fields, _config=config)

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
