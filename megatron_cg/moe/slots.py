"""Where rows lie before and after an all-to-all of a fixed size.

Note [Slots]
    An all-to-all takes its counts on the host, which a graph cannot. So here each rank sends the
    same number of rows to each rank: a slot, with room for any routing. The rows come first in
    their slot, and the rest of it is padding. Rows are packed again by indices that are computed
    on the device. The same collective works on NCCL and gloo, inside a graph too.

Note [Padding]
    Padding repeats some row. It is never computed with: packing leaves it behind. So it may hold
    anything, and its gradient is not used.
"""

from __future__ import annotations

from typing import Any

import torch


def places(counts: torch.Tensor, slot: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each packed row lies in the slots, and the inverse.

    In its slot, the rows of a rank lie by expert. Packed rows lie by expert, then by rank.

    Args:
        counts: int64 ``[ranks, experts]``: rows of each rank for each expert.
        slot: rows of a slot.
        rows: the number of packed rows, at least as many as all counts add up to.

    Returns:
        int64 ``[rows]`` and int64 ``[ranks * slot]``, each in the range of the other.
    """
    ranks, experts = counts.shape
    device = counts.device
    ends_in_slot = counts.cumsum(1)
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    # Of a packed row: its chunk, which is of one expert and one rank.
    place = torch.arange(rows, device=device)
    chunk = torch.searchsorted(ends, place, right=True).clamp_(max=ranks * experts - 1)
    of_slots = slot * torch.arange(ranks, device=device).unsqueeze(1)
    starts_in_slots = (ends_in_slot - counts + of_slots).t().reshape(-1)
    in_slots = starts_in_slots[chunk] + place - starts[chunk]
    # Of a row in a slot: its expert.
    inside = torch.arange(slot, device=device).repeat(ranks, 1)
    expert = torch.searchsorted(ends_in_slot, inside, right=True).clamp_(max=experts - 1)
    before = starts.view(experts, ranks).t() - (ends_in_slot - counts)
    packed = (before.gather(1, expert) + inside).where(inside < ends_in_slot[:, -1:], 0)
    return in_slots.where(place < ends[-1], 0), packed.view(-1)


def move(rows: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows[source]``, with autograd: the gradient is moved by ``inverse``.

    Autograd's own backward function of indexing adds up rows. Here each row that counts appears
    once; see Note [Padding].
    """
    apply: Any = _Move.apply
    result: torch.Tensor = apply(rows, source, inverse)
    return result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None
