"""An exchange of rows between ranks by counts that stay on the device.

Note [Slots]
    An all-to-all takes its counts on the host, which a graph cannot. So here each rank sends the
    same number of rows to each rank: a slot. The rows come first in their slot, and the rest of it
    is padding. Before and after the collective, rows are moved by indices that are computed on the
    device. It works on NCCL and gloo, inside a graph too.

Note [Padding]
    Padding repeats some row, so it may be anything. No result has it: a row that came from no rank
    is zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Places(NamedTuple):
    """Where the rows of one rank lie, packed and in slots; see :func:`find_places`."""

    packed: torch.Tensor
    """Int64 ``[ranks * slot]``: of each place in the slots, its packed row."""
    in_slots: torch.Tensor
    """Int64 ``[rows]``: of each packed row, its place in the slots; ``ranks * slot`` if none."""


def find_places(counts: torch.Tensor, slot: int, rows: int) -> Places:
    """Find where rows lie that are packed by expert, then by rank, and by expert in each slot.

    Args:
        counts: int64 ``[ranks, experts]``: rows for each expert that are exchanged with each rank.
        slot: rows of a slot. What a rank has beyond it has no place in the slots.
        rows: the number of packed rows, at least as many as all counts add up to.
    """
    ranks, experts = counts.shape
    device = counts.device
    ends_in_slot = counts.cumsum(1)
    starts_in_slot = ends_in_slot - counts
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    # Of a packed row: its chunk, which is of one expert and one rank.
    row = torch.arange(rows, device=device)
    chunk = torch.searchsorted(ends, row, right=True).clamp_(max=ranks * experts - 1)
    inside = row - starts[chunk] + starts_in_slot.t().reshape(-1)[chunk]
    exchanged = (row < ends[-1]) & (inside < slot)
    in_slots = torch.where(exchanged, chunk % ranks * slot + inside, ranks * slot)
    # Of a place in a slot: its expert.
    place = torch.arange(slot, device=device).repeat(ranks, 1)
    expert = torch.searchsorted(ends_in_slot, place, right=True).clamp_(max=experts - 1)
    before = starts.view(experts, ranks).t() - starts_in_slot
    packed = (before.gather(1, expert) + place).where(place < ends_in_slot[:, -1:], 0)
    return Places(packed.view(-1), in_slots)


def exchange(
    rows: torch.Tensor, here: Places, there: Places, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send packed rows to the ranks of ``group``, with autograd. A collective call.

    Args:
        rows: ``[rows, ...]``, packed as ``here`` says.
        here: places of the rows that this rank sends.
        there: places of the rows that it receives.
        group: the ranks. All have slots of the same size.

    Returns:
        ``[rows, ...]``, packed as ``there`` says.
    """
    apply: Any = _Exchange.apply
    result: torch.Tensor = apply(rows, *here, *there, group)
    return result


class _Exchange(torch.autograd.Function):
    """Its backward function is the exchange in the other direction.

    Autograd's own backward function of indexing would add up rows, though each appears once.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - tensors that autograd has to see
        ctx: Any,
        rows: torch.Tensor,
        packed_here: torch.Tensor,
        in_slots_here: torch.Tensor,
        packed_there: torch.Tensor,
        in_slots_there: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed_there, in_slots_here)
        ctx.group = group
        return _exchanged(rows, packed_here, in_slots_there, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        packed, in_slots = ctx.saved_tensors
        back = _exchanged(gradients[0], packed, in_slots, ctx.group)
        return back, None, None, None, None, None


def _exchanged(
    rows: torch.Tensor, packed: torch.Tensor, in_slots: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    sent = rows.index_select(0, packed)
    received = rows.new_empty((len(sent) + 1, *sent.shape[1:]))
    dist.all_to_all_single(received[:-1], sent, group=group)
    received[-1].zero_()
    return received.index_select(0, in_slots)
