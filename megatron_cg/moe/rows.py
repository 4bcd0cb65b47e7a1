"""Reordering rows by counts that stay on the device."""

from __future__ import annotations

from typing import Any

import torch


def order(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """For rows in chunks ``[i, j]``, ``i`` outermost: where each row of the order ``[j, i]`` comes
    from.

    Args:
        counts: int64 ``[m, n]``: rows of each chunk.
        rows: the number of rows. Those that no chunk has stay where they are.

    Returns:
        int64 ``[rows]``, a permutation. That of ``counts.t()`` is its inverse.
    """
    before = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view_as(counts)
    lengths, starts = counts.t().reshape(-1), before.t().reshape(-1)
    ends = lengths.cumsum(0)
    place = torch.arange(rows, device=counts.device)
    chunk = torch.searchsorted(ends, place, right=True).clamp_(max=len(ends) - 1)
    source = starts[chunk] + place - (ends - lengths)[chunk]
    return torch.where(place < ends[-1], source, place)


def reorder(rows: torch.Tensor, forward: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows[forward]``, with autograd; ``inverse`` is the inverse permutation.

    Autograd's own backward function of indexing adds up rows, since it cannot know that each
    appears once. Here the gradient is reordered.
    """
    apply: Any = _Reorder.apply
    result: torch.Tensor = apply(rows, forward, inverse)
    return result


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, forward: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None
