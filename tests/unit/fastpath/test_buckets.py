"""Gradients that come together: whether there is nothing to do but to copy them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.gradients.buckets import Together

Gradients = list[torch.Tensor | None]


def plain() -> tuple[Together, Gradients]:
    weights: list[Any] = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    for weight in weights:
        weight.grad_added_to_main_grad = False
    return Together(weights, None), [torch.ones(2, 3) for _ in weights]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "gradient", [None, torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).half()]
)
def test_each_gradient_must_be_a_plain_one(place: int, gradient: torch.Tensor | None) -> None:
    together, gradients = plain()
    assert together.are_plain(gradients)
    gradients[place] = gradient
    assert not together.are_plain(gradients)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("name", "value"), [("grad", torch.zeros(2, 3)), ("grad_added_to_main_grad", True)]
)
def test_each_weight_must_wait_for_nothing_else(place: int, name: str, value: object) -> None:
    together, gradients = plain()
    setattr(together.weights[place], name, value)
    assert not together.are_plain(gradients)
