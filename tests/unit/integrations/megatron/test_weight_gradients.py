"""Which layers stop writing weight gradients by themselves while graphs live."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from megatron_cg.integrations.megatron.weight_gradients import weight_gradients_returned

OF_TE, OF_MEGATRON = "fuse_wgrad_accumulation", "gradient_accumulation_fusion"


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
    linear: Any = nn.Linear(2, 2)
    setattr(linear, name, True)
    layer, without = nn.Sequential(linear), nn.Linear(2, 2)
    before = dict(vars(without))
    undo = weight_gradients_returned(nn.Sequential(layer, without), [layer] if captured else [])
    assert getattr(linear, name) is stays and vars(without) == before
    undo()
    assert getattr(linear, name) is True
