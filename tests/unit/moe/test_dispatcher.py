"""The dispatcher against Megatron's, with routings that a router seldom makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_cg.moe import dispatcher
from megatron_cg.moe.dispatcher import DeviceDispatcher
from tests.unit.moe.routings import ROUTINGS, compare, overflow
from tests.unit.ranks import on_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_gives_megatrons_bits(ranks: int) -> None:
    for equal in on_ranks(compare, ranks):
        assert len(equal) == 2 * len(ROUTINGS)
        # Output, hidden states, probabilities and at least one weight.
        assert all(len(found) >= 4 and all(found) for found in equal.values()), equal


@pytest.mark.parametrize("ranks", [2, 4])
def test_beyond_a_bound_all_numbers_are_finite(ranks: int) -> None:
    assert on_ranks(overflow, ranks) == [[]] * ranks


def test_a_shared_expert_waits_before_each_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream reads what this stream computes: the tokens, and all ranks' results."""
    monkeypatch.setattr(dispatcher, "is_capturing", lambda: True)
    made: Any = DeviceDispatcher.__new__(DeviceDispatcher)
    shared = MagicMock()
    vars(made).update(ep_size=1, shared_experts=shared, config=SimpleNamespace())
    rows = torch.ones(2, 3)

    def stages() -> list[str]:
        names = [name for name, *_ in shared.method_calls]
        shared.reset_mock()
        return names

    made.token_dispatch(rows, rows[:, 0])
    assert stages() == ["wait_current_stream", "linear_fc1_forward_and_act"]
    made.token_combine(rows)
    assert stages() == ["wait_current_stream", "linear_fc2_forward", "post_forward_comm"]
