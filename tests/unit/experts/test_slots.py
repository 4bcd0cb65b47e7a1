"""Places in slots, against the order of rows in Megatron's dispatcher."""

import math

import pytest
import torch

from megatron_cg.experts.slots import find_places
from tests.unit.interpreted import last_line_of

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
def test_rows_are_packed_by_expert_then_by_rank_and_others_have_no_place(
    given: list[list[int]],
) -> None:
    order = chunks(given)
    used = len(order)
    packed, in_slots, read = find_places(torch.tensor(given), SLOT, used + MORE)
    assert read.tolist() == [used]
    assert find_places(torch.tensor(given), SLOT, used + MORE, whole=True).used == used + MORE
    expected = [SLOT * rank + inside for _, rank, inside in order]
    assert in_slots[:used].tolist() == expected
    assert set(in_slots[used:].tolist()) == {len(given) * SLOT}
    assert packed[torch.tensor(expected, dtype=torch.long)].tolist() == list(range(used))
    # Padding has some row.
    assert packed.shape == (len(given) * SLOT,) and set(packed.tolist()) <= set(range(max(used, 1)))


@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_rows_of_an_expert_begin_at_a_multiple_and_gaps_have_no_place(
    given: list[list[int]],
) -> None:
    counts = torch.tensor(given)
    own, none = counts.sum(0), len(given) * SLOT
    rounded = own + -own % 4
    assert rounded.tolist() == [4 * math.ceil(rows / 4) for rows in own.tolist()]
    used = int(rounded.sum())
    found = find_places(counts, SLOT, used + MORE, gaps=-own % 4)
    dense = find_places(counts, SLOT, int(own.sum())).in_slots.split(own.tolist())
    gaps = [torch.full((int(gap),), none) for gap in rounded - own]
    expected = torch.cat([part for pair in zip(dense, gaps, strict=True) for part in pair]).tolist()
    assert found.used.tolist() == [used]
    assert found.in_slots.tolist() == expected + [none] * MORE
    assert all(place == none or found.packed[place] == row for row, place in enumerate(expected))


@pytest.mark.parametrize(
    ("counts", "packed", "in_slots"),
    [
        ([[2, 1], [0, 3]], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ([[2, 1], [1, 2]], [0, 1, 3, 2, 4, 5], [0, 1, 3, 2, 4, 5]),
        # The first rank has four rows for a slot of three, the second has two.
        ([[4], [2]], [0, 1, 2, 4, 5, 0], [0, 1, 2, 6, 3, 4]),
        ([[2, 2], [1, 0]], [0, 1, 3, 2, 0, 0], [0, 1, 3, 2, 6]),
    ],
)
def test_a_slot_may_be_full_and_what_it_has_no_room_for_has_no_place(
    counts: list[list[int]], packed: list[int], in_slots: list[int]
) -> None:
    found = find_places(torch.tensor(counts), 3, sum(map(sum, counts)))
    assert (found.packed.tolist(), found.in_slots.tolist()) == (packed, in_slots)


KERNEL = """
import sys
import torch
from megatron_cg.experts.kernels import places_of
from megatron_cg.experts.slots import find_places

torch.manual_seed(0)
for case in range(24):
    ranks, experts = (1, 2, 3, 4)[case % 4], (1, 5, 16)[case % 3]
    counts = torch.randint(0, (4, 900, 3000)[case % 3], (ranks, experts))
    counts[torch.rand(ranks, experts) < 0.3] = 0
    slot, whole = int(counts.sum(1).amax()) // (1 + case % 2) + 1, case % 5 == 0
    given = (counts, slot, int(counts.sum()) + 1500 * (case % 3))
    ours, torchs = places_of(*given, whole=whole), find_places(*given, whole=whole)
    assert all(map(torch.equal, ours, torchs)), given
    gaps = -counts.sum(0) % 16
    rows = given[2] + int(gaps.sum())
    ours = places_of(counts, slot, rows, gaps.cumsum(0), whole=whole)
    torchs = find_places(counts, slot, rows, whole=whole, gaps=gaps)
    assert all(map(torch.equal, ours, torchs)), given
print("equal")
"""


def test_the_kernel_finds_the_same_places() -> None:
    assert last_line_of(KERNEL) == "equal"
