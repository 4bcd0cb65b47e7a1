"""Dropout that drops nothing is no operation in compiled code, as in an eager pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_cg.compiled.region import Region
from megatron_cg.compiled.trace import Trace, trace
from megatron_cg.errors import PrecompileError


class Attended(nn.Module):
    """Dropout after a softmax, with its arguments by position or by name."""

    def __init__(self, p: float, training: bool | None, by_name: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.p, self.is_training, self.by_name = p, training, by_name

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        probabilities = self.linear(given).softmax(-1)
        if self.is_training is None:
            kept = nn.functional.dropout(probabilities, self.p)
        elif self.by_name:
            kept = nn.functional.dropout(
                input=probabilities, p=self.p, training=self.is_training, inplace=False
            )
        else:
            kept = nn.functional.dropout(probabilities, self.p, self.is_training)
        out: torch.Tensor = self.linear(kept)
        return out


def traced(p: float, training: bool | None = True, by_name: bool = False) -> Trace:
    with torch.device("meta"):
        module = Attended(p, training, by_name)
        given = torch.randn(3, 8, requires_grad=True)
    return trace(Region(module, (given,)), 0, None)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_the_probabilities_are_not_copied(p: float, training: bool, by_name: bool) -> None:
    forward = [line.text for line in traced(p, training, by_name).code["forward"]]
    assert any("_softmax" in text for text in forward)
    assert [text for text in forward if "clone" in text or "dropout" in text] == []


@pytest.mark.parametrize("training", [True, None])
def test_dropout_that_drops_is_still_refused(training: bool | None) -> None:
    with pytest.raises(PrecompileError, match="draws random numbers"):
        traced(0.5, training)
