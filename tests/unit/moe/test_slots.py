"""Places in slots, against the order of rows in Megatron's dispatcher, and exchanges by slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.moe.peer_memory import PeerMemory
from megatron_cg.moe.slots import Collective, Transport, exchange, find_places
from tests.unit.ranks import on_ranks

SENT, WIDTH = 12, 5
SHARES: dict[str, list[list[int]]] = {
    "two, uneven": [[2, 10], [7, 5]],
    "two, all to one": [[12, 0], [12, 0]],
    "two, nothing exchanged": [[12, 0], [0, 12]],
    "two, nothing at all": [[0, 0], [0, 0]],
    "two, some rows for nobody": [[3, 4], [0, 5]],
    "four, uneven": [[1, 2, 3, 6], [0, 12, 0, 0], [4, 0, 4, 4], [3, 3, 3, 3]],
    "four, all to one": [[0, 0, 12, 0]] * 4,
}
"""Rows that each rank sends to each, of one expert."""


def expected(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """What an all-to-all with its counts on the host gives."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows[: sum(sent)].contiguous(), received, sent)
    return result


def check() -> Any:
    """Exchange rows of each shape forward and backward by each transport; say what was wrong."""
    group: Any = dist.group.WORLD
    return [*checked(Collective(group)), *checked(PeerMemory(group))]


def checked(transport: Transport) -> list[str]:
    """What was wrong with one transport."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    for name, shares in SHARES.items():
        if len(shares) != ranks:
            continue
        sent, received = shares[rank], [row[rank] for row in shares]
        here, there = (
            find_places(torch.tensor(counts).unsqueeze(1), SENT, rows)
            for counts, rows in ((sent, SENT), (received, ranks * SENT))
        )
        for shape in ((WIDTH,), ()):
            torch.manual_seed(100 * rank)
            rows = torch.randn(SENT, *shape, requires_grad=True)
            found = exchange(rows, here, there, transport)
            theirs = expected(rows.detach(), sent, received)
            used = theirs.shape[0]
            if found.shape[0] != ranks * SENT or not torch.equal(found[:used], theirs):
                wrong.append(f"{name}: rows of {shape}")
            if found[used:].any():
                wrong.append(f"{name}: rows beyond those received are not zero")
            gradient = torch.randn(ranks * SENT, *shape)
            gradient[used:] = torch.nan
            found.backward(gradient)
            back = expected(gradient, received, sent)
            assert rows.grad is not None
            if not torch.equal(rows.grad[: sum(sent)], back) or rows.grad[sum(sent) :].any():
                wrong.append(f"{name}: gradients of {shape}")
    return wrong


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
    packed, in_slots = find_places(torch.tensor(given), SLOT, used + MORE)
    expected = [SLOT * rank + inside for _, rank, inside in order]
    assert in_slots[:used].tolist() == expected
    assert set(in_slots[used:].tolist()) == {len(given) * SLOT}
    assert packed[torch.tensor(expected, dtype=torch.long)].tolist() == list(range(used))
    # Padding has some row.
    assert packed.shape == (len(given) * SLOT,) and set(packed.tolist()) <= set(range(max(used, 1)))


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_and_gradients_arrive_as_with_counts_on_the_host(ranks: int) -> None:
    assert on_ranks(check, ranks) == [[]] * ranks
