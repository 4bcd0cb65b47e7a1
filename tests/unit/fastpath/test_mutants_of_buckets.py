"""What nothing looked at in buckets of gradients, found by ``python -m tools.mutate``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath.gradients.buckets import Bucket, Together


def bucket(size: int) -> Bucket:
    nothing: Any = None
    return Bucket(number=3, gradients=nothing, views=nothing, size=size)


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_a_bucket_is_complete_with_what_was_handed_over_waits_and_comes() -> None:
    found = bucket(6)
    assert not found.complete_with(5) and found.complete_with(6) and not found.complete_with(7)
    found.handed_over, found.waiting = 1, weights(2)
    assert found.complete_with(3) is True and found.complete_with(2) is False


def test_only_what_waits_waits_on_a_stream() -> None:
    found = bucket(2)
    assert (found.waiting_bytes, found.handed_over, found.stream) == (0, 0, 0)
    assert found.waits_on_another(7) is False
    found.waiting = weights(1)
    assert found.waits_on_another(7) is True and found.waits_on_another(0) is False


def test_a_new_pass_forgets_what_waited_and_was_handed_over() -> None:
    found, backward = bucket(2), object()
    found.waiting, found.waiting_bytes, found.handed_over = weights(1), 8, 1
    found.begin(backward)
    assert found.backward is backward and found.waiting == []
    assert (found.waiting_bytes, found.handed_over) == (0, 0)


def test_weights_that_come_together_know_all_and_all_but_the_last() -> None:
    three = weights(3)
    found = Together(three, [bucket(3)] * 3)
    (part,) = found.parts
    assert found.all == set(three) and part.others == set(three[:2])
    assert found.plain([None, *(torch.zeros(2) for _ in range(2))]) is None
    assert Together(weights(1), [bucket(1)]).parts[0].others == frozenset()
