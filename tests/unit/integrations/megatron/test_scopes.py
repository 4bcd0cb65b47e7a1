"""A layer's view of the config it shares with all others."""

from dataclasses import replace
from typing import Any

from megatron_cg.integrations.megatron.megatron_unit import units_of
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


def test_every_unit_has_a_name_of_its_own_and_advice_that_fits(one_rank: None) -> None:
    from megatron.core import parallel_state, tensor_parallel

    from tests.functional.loops import GROUPS, Run
    from tests.functional.own_loop import make_config, make_model

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = {**GROUPS["mtp"].config, "mtp_num_layers": 2}
    group = replace(GROUPS["mtp"], config=config)
    model: Any = make_model(group, make_config(group, Run("fp32", ("attn",))))
    decoder, predicts = model.decoder.layers, [layer.mtp_model_layer for layer in model.mtp.layers]
    units = units_of([*decoder, *predicts])
    names = [unit.name for unit in units]
    expected = [f"layer {number}" for number in range(len(decoder))]
    assert names == [*expected, "MTP layer 0", "MTP layer 1"]
    assert "for this layer alone" in units[0].leave_out(None)
    assert units[-1].leave_out(None) == "Leave the scope out of --cuda-graph-modules attn."
    # A layer spec may give two layers one number.
    decoder[1].layer_number = decoder[0].layer_number
    assert len({unit.name for unit in units_of(decoder)}) == len(decoder)
