"""An exchange of rows between ranks by counts that stay on the device.

Note [Slots]
    An all-to-all takes its counts on the host, which a graph cannot. So here each rank has room for
    the same number of rows from each rank: a slot. The rows come first in their slot, and the rest
    of it is padding. Rows are moved into slots and out of them by indices that are computed on the
    device. A :class:`Transport` fills the slots of other ranks: :class:`Collective`, or
    ``peer_memory.py``.

Note [Padding]
    Padding may be anything. No result has it: a row that a slot had no room for is zero. A rank
    that gets fewer rows than fit has rows at the end that nothing reads. They may be anything too.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Places(NamedTuple):
    """Where the rows of one rank lie, packed and in slots; see :func:`find_places`."""

    packed: torch.Tensor
    """Int64 ``[ranks * slot]``: of each place in the slots, its packed row."""
    in_slots: torch.Tensor
    """Int64 ``[rows]``: of each packed row, its place in the slots; ``ranks * slot`` if none."""
    used: torch.Tensor
    """Int64 ``[1]``: how many packed rows are read; what lies beyond them may be anything."""


Transport = Callable[[torch.Tensor, Places, Places], torch.Tensor]
"""Sends rows that are packed as the first places say; returns those of the second, packed.

``[rows, ...]`` both; all ranks call it. What has no place is not sent, and received as zero if it
is among the rows that are used.
"""


def gaps_of(counts: torch.Tensor, multiple: int) -> torch.Tensor:
    return (-counts) % multiple


def find_places(
    counts: torch.Tensor,
    slot: int,
    rows: int,
    *,
    whole: bool = False,
    gaps: torch.Tensor | None = None,
) -> Places:
    """Find where rows lie that are packed by expert, then by rank, and by expert in each slot.

    Args:
        counts: int64 ``[ranks, experts]``: rows for each expert that are exchanged with each rank.
        slot: rows of a slot. What a rank has beyond it has no place in the slots.
        rows: the number of packed rows, at least as many as all counts add up to.
        whole: whether those beyond all counts are read too. They are received as zero.
        gaps: int64 ``[experts]``: packed rows between those of each expert and what comes next.
            They are received as zero.
    """
    gaps = None if gaps is None else gaps.cumsum(0)
    if counts.is_cuda and find_spec("triton") is not None:
        from megatron_cg.moe.kernels import places_of

        return Places(*places_of(counts, slot, rows, gaps, whole=whole))
    ranks, experts = counts.shape
    device = counts.device
    ends_in_slot = counts.cumsum(1)
    starts_in_slot = ends_in_slot - counts
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    beyond = ends[-1:]
    if gaps is not None:
        beyond = beyond + gaps[-1:]
        ends[ranks:] += gaps[:-1].repeat_interleave(ranks)
    starts = ends - lengths
    # Of a packed row: its chunk, which is of one expert and one rank.
    row = torch.arange(rows, device=device)
    chunk = torch.searchsorted(ends, row, right=True).clamp_(max=ranks * experts - 1)
    inside = row - starts[chunk] + starts_in_slot.t().reshape(-1)[chunk]
    exchanged = (starts[chunk] <= row) & (row < ends[-1]) & (inside < slot)
    in_slots = torch.where(exchanged, chunk % ranks * slot + inside, ranks * slot)
    # Of a place in a slot: its expert.
    place = torch.arange(slot, device=device).repeat(ranks, 1)
    expert = torch.searchsorted(ends_in_slot, place, right=True).clamp_(max=experts - 1)
    before = starts.view(experts, ranks).t() - starts_in_slot
    packed = (before.gather(1, expert) + place).where(place < ends_in_slot[:, -1:], 0)
    used = torch.full_like(beyond, rows) if whole else beyond
    return Places(packed.view(-1), in_slots, used)


def exchange(rows: torch.Tensor, here: Places, there: Places, transport: Transport) -> torch.Tensor:
    """Send packed rows to other ranks, with autograd. A collective call.

    Takes ``[rows, ...]``, packed as ``here`` says, and returns those that this rank receives,
    packed as ``there`` says. All ranks have slots of the same size.
    """
    apply: Any = _Exchange.apply
    result: torch.Tensor = apply(rows, transport, *here, *there)
    return result


class _Exchange(torch.autograd.Function):
    """Its backward function is the exchange in the other direction.

    Autograd's own backward function of indexing would add up rows, though each appears once.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, transport: Transport, *places: torch.Tensor
    ) -> torch.Tensor:
        """``places`` are those here and there, as tensors that autograd has to see."""
        ctx.save_for_backward(*places)
        ctx.transport = transport
        return transport(rows, *_here_and_there(places))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        here, there = _here_and_there(ctx.saved_tensors)
        back = ctx.transport(gradients[0], there, here)
        return back, None, *[None] * len(ctx.saved_tensors)


def _here_and_there(tensors: Sequence[torch.Tensor]) -> tuple[Places, Places]:
    half = len(Places._fields)
    return Places(*tensors[:half]), Places(*tensors[half:])


class Collective:
    """A :class:`Transport` by one all-to-all of whole slots, padding included.

    It works on NCCL and gloo, inside a graph too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: torch.Tensor, here: Places, there: Places) -> torch.Tensor:
        """Padding repeats some row."""
        sent = rows.index_select(0, here.packed)
        received = rows.new_empty((len(sent) + 1, *sent.shape[1:]))
        if dist.get_world_size(self._group) > 1:
            dist.all_to_all_single(received[:-1], sent, group=self._group)
        else:
            received[:-1] = sent
        received[-1].zero_()
        return received.index_select(0, there.in_slots)
