"""The dispatcher against Megatron's, with routings that a router seldom makes."""

from __future__ import annotations

import pytest

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
