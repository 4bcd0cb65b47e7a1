"""What ``--cg-layers`` selects; our tables against the real classes of megatron-core."""

import dataclasses
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.arguments.layers import LayerSelection, available_scopes, read_tokens
from megatron_cg.arguments.schema import SCOPES
from tests.unit.arguments.good_configuration import GOOD_RUN


def on(selection: LayerSelection, scope: str, num_layers: int, *scopes: str) -> list[int]:
    return [index for index in range(num_layers) if scope in selection.scopes(index, scopes)]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("attn:0", [0]),
        ("attn:0-2", [0, 1, 2]),
        ("attn:2-2", [2]),
        ("attn:4-", [4, 5]),
        ("attn:0-1,3", [0, 1, 3]),
        ("attn:3,0-1,5-,5", [0, 1, 3, 5]),
    ],
)
def test_ranges(token: str, expected: list[int]) -> None:
    selection, _ = read_tokens([token])
    assert on(selection, "attn", 6, "attn", "mlp") == expected
    assert on(selection, "mlp", 6, "attn", "mlp") == list(range(6))
    assert not list(selection.violations(("attn", "mlp"), 6))


def test_a_scope_named_twice_has_both_ranges() -> None:
    selection, _ = read_tokens(["attn:0", "moe_router:2-", "attn:3-4"])
    assert on(selection, "attn", 6, "attn", "moe_router") == [0, 3, 4]
    assert on(selection, "moe_router", 6, "attn", "moe_router") == [2, 3, 4, 5]


@pytest.mark.parametrize("scopes", [(), ("layer",)], ids=["empty", "layer"])
def test_whole_layers_go_by_the_name_layer(scopes: tuple[str, ...]) -> None:
    selection, _ = read_tokens(["layer:0-1"])
    assert [selection.scopes(index, scopes) for index in range(3)] == [("layer",), ("layer",), ()]
    assert read_tokens([])[0].scopes(2, scopes) == ("layer",)
    assert not list(selection.violations(scopes, 3))


@pytest.mark.parametrize(
    "token",
    [
        *("attn", "0-3", "", "attention:0-3", ":0-3", "attn:", "attn:a", "attn:-3", "attn:0-3,"),
        *("attn:0-3-5", "attn:1 2", "attn:²", "attn:5-2"),
    ],
)
def test_a_bad_token_is_named_with_the_grammar_and_a_right_example(token: str) -> None:
    _, (violation,) = read_tokens(["mlp:0", token])
    assert violation.rule == "cg-layers"
    assert violation.found == f"--cg-layers {token}"
    assert "open range N-, and SCOPE one of attn, mlp, moe, moe_router" in violation.reason
    assert violation.remedy == "for example type --cg-layers attn:0-23 moe_router:4- mlp:0-3,8"


def test_preprocess_is_captured_only_with_the_router() -> None:
    routed = ("attn", "moe_router", "moe_preprocess")
    selection, _ = read_tokens(["moe_router:0-1", "moe_preprocess:1-2"])
    assert [selection.scopes(index, routed)[1:] for index in range(4)] == [
        ("moe_router",),
        ("moe_router", "moe_preprocess"),
        (),
        (),
    ]


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
