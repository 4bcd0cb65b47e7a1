"""Gradients that come together: whether there is nothing to do but to copy them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.buckets import Bucket, Together

NOTHING: Any = None
BUCKET = Bucket(0, NOTHING, NOTHING, 3)
Gradients = list[torch.Tensor | None]


def plain() -> tuple[Together, Gradients]:
    weights: list[Any] = [nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
    for weight in weights:
        weight.grad_added_to_main_grad = False
    return Together(weights, [BUCKET] * 3), [torch.ones(2, 3) for _ in weights]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "gradient", [None, torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).half()]
)
def test_each_gradient_must_be_a_plain_one(place: int, gradient: torch.Tensor | None) -> None:
    together, gradients = plain()
    assert together.plain(gradients) == [gradients]
    gradients[place] = gradient
    assert together.plain(gradients) is None


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("name", "value"), [("grad", torch.zeros(2, 3)), ("grad_added_to_main_grad", True)]
)
def test_each_weight_must_wait_for_nothing_else(place: int, name: str, value: object) -> None:
    together, gradients = plain()
    setattr(together.weights[place], name, value)
    assert together.plain(gradients) is None


def test_weights_are_parted_by_bucket_in_the_order_of_an_eager_pass() -> None:
    """The weight that a pass reaches last completes its bucket."""
    buckets = [Bucket(number, NOTHING, NOTHING, 1) for number in range(3)]
    owners = [buckets[place] for place in (2, 0, 0, 1, 2)]
    weights = [nn.Parameter(torch.zeros(1)) for _ in owners]
    together = Together(weights, owners)
    assert [(part.bucket.number, part.places) for part in together.parts] == [
        (1, [3]),
        (0, [1, 2]),
        (2, [0, 4]),
    ]
    assert [part.weights for part in together.parts] == [
        weights[3:4],
        weights[1:3],
        [weights[0], weights[4]],
    ]
    assert together.all == set(weights)
    assert [part.others for part in together.parts] == [set(), {weights[1]}, {weights[0]}]
    assert together.plain([None] * 5) is None


def test_a_bucket_is_complete_with_what_was_handed_over_waits_and_comes() -> None:
    bucket, backward = Bucket(3, NOTHING, NOTHING, 6), object()
    assert (bucket.waiting_bytes, bucket.handed_over, bucket.stream) == (0, 0, 0)
    assert bucket.complete_with(6) and not bucket.complete_with(5) and not bucket.complete_with(7)
    assert bucket.waits_on_another(7) is False
    bucket.handed_over, bucket.waiting_bytes, bucket.copied_on = 1, 8, 7
    bucket.waiting = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    assert bucket.complete_with(3) and not bucket.complete_with(2)
    assert bucket.waits_on_another(7) and not bucket.waits_on_another(0)
    bucket.begin(backward)
    assert bucket.backward is backward and bucket.waiting == [] and bucket.copied_on is None
    assert (bucket.waiting_bytes, bucket.handed_over) == (0, 0)
