"""Our rules and tables against the real classes of megatron-core, so that they cannot drift."""

import dataclasses
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.arguments.layers import available_scopes
from megatron_cg.arguments.schema import SCOPES
from tests.unit.arguments.good_configuration import GOOD_RUN


def test_our_scope_names_are_megatrons() -> None:
    assert set(SCOPES) == {module.name for module in CudaGraphModule}


@pytest.mark.parametrize("symbol", sorted(Symbols.VALID_LAYERS))
def test_every_letter_of_a_hybrid_pattern_is_known(symbol: str) -> None:
    run = dataclasses.replace(GOOD_RUN, hybrid_layer_pattern=f"{symbol}|{symbol}/MM")
    layers = available_scopes(run)
    assert layers is not None
    assert len(layers) == 2
    assert layers[0] > {"layer"}


@pytest.mark.parametrize("frequency", [1, 2, 3, (0, 1, 1, 1), (1, 0, 1, 0)], ids=str)
def test_moe_layers_are_where_megatron_puts_them(frequency: int | tuple[int, ...]) -> None:
    run = dataclasses.replace(GOOD_RUN, moe_layer_freq=frequency)
    config = TransformerConfig(
        num_layers=run.num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=run.num_experts,
        moe_layer_freq=frequency if isinstance(frequency, int) else list(frequency),
        add_bias_linear=False,
    )
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    real = [issubclass(_module_of(spec.submodules.mlp), MoELayer) for spec in specs]
    ours = available_scopes(run)
    assert ours is not None
    assert ["moe_router" in scopes for scopes in ours] == real
    assert ["mlp" in scopes for scopes in ours] == [not is_moe for is_moe in real]


def _module_of(builder: Any) -> type:
    """The class that a ``functools.partial`` of it, or of a classmethod of it, builds."""
    found = getattr(builder.func, "__self__", builder.func)
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": None},
        {"custom_layers": True},
        {"moe_layer_freq": (1, 0)},
        {"moe_layer_freq": 0},
        {"hybrid_layer_pattern": "M?"},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_known(change: dict[str, Any]) -> None:
    assert available_scopes(dataclasses.replace(GOOD_RUN, **change)) is None
