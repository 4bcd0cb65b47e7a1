"""A call is timed with each way of voting, and torch's own hook is taken off again."""

from __future__ import annotations

import torch

from benchmarks.compiled_regions import WAYS, measure


def test_each_way_is_timed(one_rank: None) -> None:
    costs = measure(calls=3)
    assert list(costs) == list(WAYS) and all(0 < fast <= median for fast, median in costs.values())
    assert torch.compiler.set_enable_guard_collectives(False) is False
