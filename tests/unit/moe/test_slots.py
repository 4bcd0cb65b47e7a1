"""Places in slots, against the order of rows in Megatron's dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.moe.slots import find_places
from tests.unit.moe.exchanges import check
from tests.unit.ranks import on_ranks

COUNTS = (
    [[2, 1, 3], [1, 2, 2]],
    [[0, 4, 0], [3, 0, 1]],
    [[0, 0, 0], [5, 0, 0]],
    [[0, 0], [0, 0]],
    [[7]],
    [[1], [2], [0], [4]],
    [[6, 0, 0], [0, 6, 0], [0, 0, 6]],
)
"""Rows of each rank for each expert."""
SLOT, MORE = 7, 5
"""Rows of a slot; packed rows that no chunk has."""


def chunks(counts: list[list[int]]) -> list[tuple[int, int, int]]:
    """Expert, rank and number in the slot of each packed row, in Megatron's order."""
    found = []
    for expert in range(len(counts[0])):
        for rank, own in enumerate(counts):
            start = sum(own[:expert])
            found += [(expert, rank, start + i) for i in range(own[expert])]
    return found


@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_rows_are_packed_by_expert_then_by_rank(given: list[list[int]]) -> None:
    order = chunks(given)
    packed, in_slots = find_places(torch.tensor(given), SLOT, len(order) + MORE)
    expected = [SLOT * rank + inside for _, rank, inside in order]
    assert in_slots[: len(order)].tolist() == expected
    assert packed[torch.tensor(expected, dtype=torch.long)].tolist() == list(range(len(order)))


@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_padding_has_some_row_and_rows_that_nobody_sent_have_no_place(
    given: list[list[int]],
) -> None:
    used = sum(map(sum, given))
    packed, in_slots = find_places(torch.tensor(given), SLOT, used + MORE)
    assert packed.shape == (len(given) * SLOT,) and in_slots.shape == (used + MORE,)
    assert set(packed.tolist()) <= set(range(max(used, 1)))
    assert set(in_slots[used:].tolist()) == {len(given) * SLOT}


def test_a_slot_may_be_full() -> None:
    assert_places([[2, 1], [0, 3]], 3, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert_places([[2, 1], [1, 2]], 3, [0, 1, 3, 2, 4, 5], [0, 1, 3, 2, 4, 5])


def test_what_a_slot_has_no_room_for_has_no_place() -> None:
    # The first rank has four rows for a slot of three, the second has two.
    assert_places([[4], [2]], 3, [0, 1, 2, 4, 5, 0], [0, 1, 2, 6, 3, 4])
    assert_places([[2, 2], [1, 0]], 3, [0, 1, 3, 2, 0, 0], [0, 1, 3, 2, 6])


def assert_places(counts: list[list[int]], slot: int, packed: Any, in_slots: Any) -> None:
    found = find_places(torch.tensor(counts), slot, sum(map(sum, counts)))
    assert (found.packed.tolist(), found.in_slots.tolist()) == (packed, in_slots)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_and_gradients_arrive_as_with_counts_on_the_host(ranks: int) -> None:
    assert on_ranks(check, ranks) == [[]] * ranks
