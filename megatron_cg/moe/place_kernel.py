"""The kernel that finds places of rows. Importing this needs Triton."""

import torch
import triton
from triton import language as tl

_BLOCK = 1024
"""Rows that a program places at a time."""


def places_of(
    counts: torch.Tensor, slot: int, rows: int, gaps: torch.Tensor | None = None, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of :func:`~megatron_cg.moe.slots.find_places`, by one kernel instead of thirty.

    ``gaps`` is int64 ``[experts]``: rows in gaps up to the end of each expert's.
    """
    ranks, experts = counts.shape
    packed, in_slots = counts.new_empty(ranks * slot), counts.new_empty(rows)
    if gaps is not None:
        in_slots.fill_(ranks * slot)
    used = counts.new_empty(1)
    # A program for each chunk of rows, and one a rank for what is in none.
    _places[ranks * (experts + 1),](
        counts.contiguous(),
        packed,
        in_slots,
        used,
        counts if gaps is None else gaps,
        slot,
        rows,
        WHOLE=whole,
        GAPS=gaps is not None,
        RANKS=ranks,
        EXPERTS=experts,
        COUNTS=triton.next_power_of_2(ranks * experts),
        BLOCK=_BLOCK,
    )
    return packed, in_slots, used


@triton.jit  # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    counts,
    packed,
    in_slots,
    used,
    gaps,
    slot,
    rows,
    WHOLE: tl.constexpr,
    GAPS: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    entry = tl.arange(0, COUNTS)
    lengths = tl.load(counts + entry, mask=entry < RANKS * EXPERTS, other=0)
    of_rank, of_expert = entry // EXPERTS, entry % EXPERTS
    expert, rank = chunk // RANKS, chunk % RANKS
    own = of_rank == rank
    before = (of_expert < expert) | ((of_expert == expert) & (of_rank < rank))
    # Of a chunk: where it begins, in all rows and in its slot.
    start = tl.sum(tl.where(before, lengths, 0))
    if GAPS:
        start += tl.load(gaps + expert - 1, mask=expert > 0, other=0)
    inside_slot = tl.sum(tl.where(own & (of_expert < expert), lengths, 0))
    number = tl.arange(0, BLOCK)
    if expert < EXPERTS:
        length = tl.sum(tl.where(own & (of_expert == expert), lengths, 0))
        first = length - length
        while first < length:
            row, inside = start + first + number, inside_slot + first + number
            known = first + number < length
            fits = inside < slot
            place = tl.where(fits, rank * slot + inside, RANKS * slot)
            tl.store(in_slots + row, place, mask=known & (row < rows))
            tl.store(packed + rank * slot + inside, row, mask=known & fits)
            first += BLOCK
    else:
        first, beyond = inside_slot, tl.sum(lengths)
        if GAPS:
            beyond += tl.load(gaps + EXPERTS - 1)
        tl.store(used, rows if WHOLE else beyond)
        while first < slot:
            tl.store(packed + rank * slot + first + number, 0, mask=first + number < slot)
            first += BLOCK
        beyond += rank * BLOCK
        while beyond < rows:
            tl.store(in_slots + beyond + number, RANKS * slot, mask=beyond + number < rows)
            beyond += RANKS * BLOCK
