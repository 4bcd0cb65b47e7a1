"""Sorting rows by counts on the device, against Megatron's sorting by counts on the host."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from megatron_cg.moe.rows import order, reorder

COUNTS = (
    [[2, 1, 3], [1, 2, 2]],
    [[0, 4, 0], [3, 0, 1]],
    [[0, 0, 0], [5, 0, 0]],
    [[0, 0], [0, 0]],
    [[7]],
    [[1], [2], [0], [4]],
)
MORE = (0, 5)
"""Rows that no chunk has."""


def sorted_by_megatron(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    places = torch.arange(counts.numel()).view_as(counts).t().ravel()
    result: torch.Tensor
    result, _ = sort_chunks_by_idxs(rows, counts.ravel(), places)
    return result


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_rows_are_sorted_as_megatron_sorts_them(given: list[list[int]], more: int) -> None:
    counts = torch.tensor(given)
    used = int(counts.sum())
    rows = torch.randn(used + more, 3)
    found = rows[order(counts, used + more)]
    assert torch.equal(found[:used], sorted_by_megatron(rows[:used], counts))
    assert torch.equal(found[used:], rows[used:])


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_transposed_counts_give_the_inverse(given: list[list[int]], more: int) -> None:
    counts = torch.tensor(given)
    count = int(counts.sum()) + more
    there, back = order(counts, count), order(counts.t(), count)
    assert torch.equal(there[back], torch.arange(count))
    assert torch.equal(back[there], torch.arange(count))


def test_the_gradient_of_sorted_rows_is_autograds() -> None:
    counts = torch.tensor([[2, 0, 3], [1, 4, 0]])
    there, back = order(counts, 12), order(counts.t(), 12)
    ours = torch.randn(12, 3, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weight = torch.randn(12, 3)
    (reorder(ours, there, back) * weight).sum().backward()
    (theirs[there] * weight).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
