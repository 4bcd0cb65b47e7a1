"""A layer's view of the config it shares with all others."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_cg.integrations.megatron.layer_scopes import give_scopes, leave_out
from megatron_cg.upstream.layer_config import LayerConfig


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


@pytest.mark.parametrize(
    ("scopes", "path", "kept", "out"),
    [
        (("attn", "moe_router"), "self_attention.core_attention", "modules moe_router", "attn"),
        (("attn", "moe_router"), "mlp.router", "modules attn", "moe_router"),
        (
            ("attn", "moe_router", "moe_preprocess"),
            "mlp.router",
            "modules attn",
            "moe_router and moe_preprocess",
        ),
        (("attn", "moe_router", "moe_preprocess"), "mlp", "modules attn moe_router", "moe_preproc"),
        (("attn", "moe_router"), "", "impl none", "attn and moe_router"),
        (("moe_router",), "mlp.router", "impl none", "moe_router"),
    ],
)
def test_what_to_type_leaves_out_the_scope_that_holds_a_module(
    scopes: tuple[str, ...], path: str, kept: str, out: str, one_rank: None
) -> None:
    from megatron_cg.tools.cpu.cpu_model import build, transformer_layers
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig

    model = build(CpuModelConfig(layers=2, graph_modules=scopes, experts=4))
    layer = transformer_layers(model)[1]
    config = vars(layer)["config"]
    text = leave_out(layer, layer.get_submodule(path) if path else None)
    assert text.startswith(f"Type --cuda-graph-{kept}, without {out}")
    assert text.endswith("leave out 1.")
    assert vars(layer)["config"] is config


def test_of_a_whole_layer_scopes_are_named(dense_model: Any) -> None:
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    layer: Any = transformer_layers(dense_model)[1]
    undo = give_scopes(layer, [])
    text = leave_out(layer, layer.mlp)
    undo()
    assert "Name the scopes that do not hold it with --cuda-graph-modules" in text
