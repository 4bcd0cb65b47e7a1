"""Places in slots, against the order of rows in Megatron's dispatcher."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.moe.slots import move, places

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
    in_slots, packed = places(torch.tensor(given), SLOT, len(order) + MORE)
    expected = [SLOT * rank + inside for _, rank, inside in order]
    assert in_slots[: len(order)].tolist() == expected
    assert packed[torch.tensor(expected, dtype=torch.long)].tolist() == list(range(len(order)))


@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_places_without_a_row_are_in_range(given: list[list[int]]) -> None:
    rows = sum(map(sum, given)) + MORE
    in_slots, packed = places(torch.tensor(given), SLOT, rows)
    assert in_slots.shape == (rows,) and packed.shape == (len(given) * SLOT,)
    assert int(in_slots.min()) >= 0 and int(in_slots.max()) < len(given) * SLOT
    assert int(packed.min()) >= 0 and int(packed.max()) < rows


def test_a_slot_may_be_full() -> None:
    in_slots, packed = places(torch.tensor([[2, 1], [0, 3]]), 3, 6)
    assert in_slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert packed.tolist() == [0, 1, 2, 3, 4, 5]
    in_slots, packed = places(torch.tensor([[2, 1], [1, 2]]), 3, 6)
    assert in_slots.tolist() == [0, 1, 3, 2, 4, 5]
    assert packed.tolist() == [0, 1, 3, 2, 4, 5]


def test_the_gradient_of_moved_rows_is_autograds_and_padding_adds_nothing() -> None:
    counts = torch.tensor([[2, 0, 3], [1, 4, 0]])
    used = int(counts.sum())
    in_slots, packed = places(counts, SLOT, used + MORE)
    ours = torch.randn(2 * SLOT, 3, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    gradient = torch.randn(used + MORE, 3)
    gradient[used:] = torch.nan
    move(ours, in_slots, packed).backward(gradient)
    theirs[in_slots[:used]].backward(gradient[:used])
    assert ours.grad is not None and theirs.grad is not None
    real = in_slots[:used]
    assert torch.equal(ours.grad[real], theirs.grad[real])
    assert ours.grad.isfinite().all()
