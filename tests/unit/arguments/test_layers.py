"""The grammar of ``--cg-layers`` and what it selects."""

import pytest

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.errors import ConfigurationError


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
    selection = LayerSelection.parse([token])
    assert on(selection, "attn", 6, "attn", "mlp") == expected
    assert on(selection, "mlp", 6, "attn", "mlp") == list(range(6))
    assert not list(selection.violations(("attn", "mlp"), 6))


def test_a_scope_named_twice_has_both_ranges() -> None:
    selection = LayerSelection.parse(["attn:0", "moe_router:2-", "attn:3-4"])
    assert on(selection, "attn", 6, "attn", "moe_router") == [0, 3, 4]
    assert on(selection, "moe_router", 6, "attn", "moe_router") == [2, 3, 4, 5]


@pytest.mark.parametrize("scopes", [(), ("layer",)], ids=["empty", "layer"])
def test_whole_layers_go_by_the_name_layer(scopes: tuple[str, ...]) -> None:
    selection = LayerSelection.parse(["layer:0-1"])
    assert [selection.scopes(index, scopes) for index in range(3)] == [("layer",), ("layer",), ()]
    assert LayerSelection.parse([]).scopes(2, scopes) == ("layer",)
    assert not list(selection.violations(scopes, 3))


@pytest.mark.parametrize(
    "token",
    [
        *("attn", "0-3", "", "attention:0-3", ":0-3", "attn:", "attn:a", "attn:-3", "attn:0-3,"),
        *("attn:0-3-5", "attn:1 2", "attn:²", "attn:5-2"),
    ],
)
def test_a_bad_token_is_named_with_the_grammar_and_a_right_example(token: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LayerSelection.parse(["mlp:0", token])
    (violation,) = caught.value.violations
    assert violation.rule == "cg-layers"
    assert violation.found == f"--cg-layers {token}"
    assert "open range N-, and SCOPE one of attn, mlp, moe, moe_router" in violation.reason
    assert violation.remedy == "for example type --cg-layers attn:0-23 moe_router:4- mlp:0-3,8"


def test_preprocess_is_captured_only_with_the_router() -> None:
    routed = ("attn", "moe_router", "moe_preprocess")
    selection = LayerSelection.parse(["moe_router:0-1", "moe_preprocess:1-2"])
    assert [selection.scopes(index, routed)[1:] for index in range(4)] == [
        ("moe_router",),
        ("moe_router", "moe_preprocess"),
        (),
        (),
    ]
