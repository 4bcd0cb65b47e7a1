"""Which layers stop writing weight gradients by themselves while graphs live."""

from __future__ import annotations

import pytest
from torch import nn

from megatron_cg.integrations.megatron.weight_gradients import weight_gradients_returned

OF_TE, OF_MEGATRON = "fuse_wgrad_accumulation", "gradient_accumulation_fusion"


def block(**settings: bool) -> nn.Module:
    """A layer around one linear layer with these settings."""
    linear = nn.Linear(2, 2)
    for name, value in settings.items():
        setattr(linear, name, value)
    return nn.Sequential(linear)


def is_on(layer: nn.Module, name: str) -> bool:
    return bool(getattr(layer.get_submodule("0"), name))


@pytest.mark.parametrize(
    ("name", "captured", "stays"),
    [
        (OF_TE, True, False),
        (OF_TE, False, False),
        (OF_MEGATRON, True, False),
        (OF_MEGATRON, False, True),
    ],
)
def test_megatrons_own_layers_keep_the_fusion_outside_of_graphs(
    name: str, captured: bool, stays: bool
) -> None:
    layer = block(**{name: True})
    undo = weight_gradients_returned(nn.Sequential(layer, block()), [layer] if captured else [])
    assert is_on(layer, name) is stays
    undo()
    assert is_on(layer, name)


def test_a_layer_without_the_fusion_is_not_changed() -> None:
    layer = block(**{OF_TE: False})
    before = dict(vars(layer.get_submodule("0")))
    weight_gradients_returned(layer, [layer])
    assert vars(layer.get_submodule("0")) == before
