"""A layer's view of the config it shares with all others."""

from __future__ import annotations

from typing import Any

from megatron_cg.integrations.megatron.scopes import give_scopes
from megatron_cg.upstream.megatron import LayerConfig


def test_only_the_scopes_differ_and_the_rest_is_shared(dense_model: Any) -> None:
    config = dense_model.config
    view = LayerConfig(config, cuda_graph_modules=["attn"])
    assert isinstance(view, type(config))
    assert view.cuda_graph_modules == ["attn"]
    assert [module.name for module in config.cuda_graph_modules] == ["attn", "mlp"]
    view.hidden_dropout = 0.25
    assert config.hidden_dropout == 0.25
    config.layernorm_epsilon = 1e-3
    assert view.layernorm_epsilon == 1e-3


def test_give_scopes_is_undone(dense_model: Any) -> None:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    layer: Any = transformer_layers(dense_model)[0]
    before = (layer.config, layer.mlp.config)
    undo = give_scopes(layer, ["attn"])
    assert layer.config.cuda_graph_modules == layer.mlp.config.cuda_graph_modules == ["attn"]
    undo()
    undo()
    assert (layer.config, layer.mlp.config) == before
