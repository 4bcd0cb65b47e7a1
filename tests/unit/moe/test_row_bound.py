"""How many rows a graph has room for, and what happens when a rank receives more."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.moe.dispatcher import most_rows
from megatron_cg.moe.row_bound import MULTIPLE, RowBound

pytestmark = pytest.mark.usefixtures("one_rank")


def placed(factor: float = 1.0) -> RowBound:
    bound = RowBound(factor)
    bound.place()
    bound.rows(1000, 10**6)
    bound.begin_step()
    return bound


@pytest.mark.parametrize(
    ("factor", "sent", "worst", "rows"),
    [
        (1.0, 1024, 4096, 1024),
        (1.0, 1025, 4096, 1152),
        (1.25, 1024, 4096, 1280),
        (1.3, 1024, 4096, 1408),
        (4.0, 1024, 4096, 4096),
        (5.0, 1024, 4096, 4096),
        (float("inf"), 1024, 4096, 4096),
        (1.0, 64, 100, 100),
        (1.0, 0, 0, 0),
    ],
)
def test_room_is_a_multiple_of_the_average_and_of_128_up_to_the_worst_case(
    factor: float, sent: int, worst: int, rows: int
) -> None:
    bound = RowBound(factor)
    assert bound.rows(sent, worst) == bound.bound == rows
    assert rows == worst or rows % MULTIPLE == 0


@pytest.mark.parametrize(
    ("topk", "ranks", "local", "worst"),
    [(2, 2, 2, 120), (8, 2, 64, 480), (8, 4, 2, 240), (3, 2, 2, 120)],
)
def test_in_the_worst_case_all_tokens_choose_this_ranks_experts(
    topk: int, ranks: int, local: int, worst: int
) -> None:
    assert most_rows(30 * topk, topk, ranks, local) == worst


COUNTS = torch.tensor([[2, 10], [7, 5]])


@pytest.mark.parametrize(("rows", "fits"), [(15, 1), (16, 1), (14, 0), (9, 0)])
def test_the_rank_that_receives_most_decides(rows: int, fits: int) -> None:
    bound = placed()
    found = bound.fits(COUNTS, rows)
    assert found.dtype == COUNTS.dtype and int(found) == fits
    assert bound.holds() == bool(fits)
    assert bound.exceeded() == (0 if fits else 15)


def test_the_largest_number_of_a_step_is_kept_and_the_next_step_forgets_it() -> None:
    bound = placed()
    for more in (0, 8, 4):
        bound.fits(COUNTS + more, 16)
    bound.fits(COUNTS, 16)
    assert bound.exceeded() == 31 and not bound.holds()
    bound.begin_step()
    assert bound.holds() and bound.exceeded() == 0


def test_what_was_shared_is_what_is_read() -> None:
    bound = placed()
    bound.share()
    bound.fits(COUNTS, 1)
    assert bound.exceeded() == 0
    bound.begin_step()
    bound.fits(COUNTS, 1)
    assert bound.exceeded() == 15


def test_the_memory_of_graphs_is_made_once() -> None:
    bound = placed()
    bound.fits(COUNTS, 1)
    bound.place()
    assert bound.exceeded() == 15


def test_enough_is_a_factor_that_has_room() -> None:
    bound = placed()
    assert [bound.enough(rows) for rows in (1000, 1001, 1250, 1999)] == [1.0, 1.01, 1.25, 2.0]
