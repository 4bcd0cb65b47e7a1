"""Kernels of an exchange of rows by peer memory or slots, and of rows that experts keep.

Importing this needs Triton.

Note [Rows that stay]
    Rows of this rank for its own experts do not pass through its slots: the kernel that reads the
    slots reads them where they are. Rows beyond those that are used are neither read nor written.
"""

from typing import Any

import torch
import triton
from triton import language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""A row is moved as words of the first of these sizes that divides it."""
_TILE = 512
"""Words that a program moves at a time: of one row, or of several short ones."""
_BLOCK = 1024
"""Rows that a program places at a time."""
_KEPT_BLOCK, _KEPT_PROGRAMS = 2048, 1056
"""Words that a program moves to or from a stash at a time, and programs at most: they stop at the
used rows."""


def write_rows(
    rows: torch.Tensor, places: torch.Tensor, addresses: torch.Tensor, rank: int, count: int
) -> None:
    """Write each row to its place in the slots of this rank on the other rank that gets it.

    ``rows`` are contiguous, and ``places`` as :attr:`.Places.in_slots`, by the rank that gets the
    row. A row for this ``rank`` goes nowhere, nor one with a place of ``count`` or more: that is
    how many rows the slots of a rank have. ``addresses`` are those of :class:`._Slots`.
    """
    (words,), grid, sizes = _tiles(rows)
    slot = count // len(addresses)
    _write[grid](words, places, addresses, rank, slot, count, len(rows), **sizes)


def read_rows(
    slots: torch.Tensor,
    rows: torch.Tensor,
    packed: torch.Tensor,
    places: torch.Tensor,
    used: torch.Tensor,
    *,
    rank: int,
    slot: int,
) -> torch.Tensor:
    """Read the rows that this rank received, in the order of ``places``; zero if in no slot.

    ``rows`` are what it sent, contiguous, packed as :attr:`.Places.packed` says. ``places`` and
    ``used`` are ``in_slots`` and ``used`` of what it gets: rows beyond ``used`` are not
    initialized. ``slots`` are the rows of :class:`._Slots`, ``slot`` of them for each rank.
    """
    received = rows.new_empty(len(places), rows.shape[1])
    words, grid, sizes = _tiles(received, slots, rows)
    _read[grid](*words, packed, places, used, rank, slot, len(packed), **sizes)
    return received


def _tiles(rows: torch.Tensor, *others: torch.Tensor) -> tuple[Any, tuple[int], dict[str, int]]:
    """All of them as words, programs for ``rows``, and what a kernel is compiled for."""
    size = rows.shape[1] * rows.element_size()
    word = _word(size)
    words = [tensor.view(_WORDS[word]) for tensor in (rows, *others)]
    width = size // word
    block = min(_TILE, triton.next_power_of_2(width))
    aligned = size % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in words)
    sizes = {"WIDTH": width, "WORD": word, "ALIGNED": 16 if aligned else word}
    sizes |= {"ROWS": _TILE // block, "BLOCK": block}
    return words, (triton.cdiv(len(rows), sizes["ROWS"]),), sizes


def _word(size: int) -> int:
    return next(word for word in _WORDS if size % word == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    rows,
    places,
    addresses,
    rank,
    slot,
    count,
    number,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(places + row, mask=row < number, other=count)
    goes = (place < count) & (place // slot != rank)
    begin = tl.load(addresses + place // slot, mask=goes, other=0)
    begin += (rank * slot + place % slot) * WIDTH * WORD
    target = tl.multiple_of(begin.to(tl.pointer_type(rows.dtype.element_ty)), ALIGNED)
    source = rows + row * WIDTH
    for start in range(0, WIDTH, BLOCK):
        word = (start + tl.arange(0, BLOCK))[None, :]
        inside = goes[:, None] & (word < WIDTH)
        tl.store(target[:, None] + word, tl.load(source[:, None] + word, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    received,
    slots,
    rows,
    packed,
    places,
    used,
    rank,
    slot,
    count,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wanted = row < tl.load(used)
    place = tl.load(places + row, mask=wanted, other=count)
    somewhere = place < count
    own = somewhere & (place // slot == rank)
    here = tl.load(packed + place, mask=own, other=0)
    begin = tl.where(
        own, rows.to(tl.int64) + here * (WIDTH * WORD), slots.to(tl.int64) + place * (WIDTH * WORD)
    )
    source = tl.multiple_of(begin.to(tl.pointer_type(rows.dtype.element_ty)), ALIGNED)
    target = received + row * WIDTH
    for start in range(0, WIDTH, BLOCK):
        word = (start + tl.arange(0, BLOCK))[None, :]
        inside = wanted[:, None] & (word < WIDTH)
        moved = tl.load(source[:, None] + word, mask=inside & somewhere[:, None], other=0)
        tl.store(target[:, None] + word, moved, mask=inside)


def places_of(
    counts: torch.Tensor, slot: int, rows: int, gaps: torch.Tensor | None = None, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of :func:`~megatron_cg.experts.slots.find_places`, by one kernel, not thirty.

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


def move_rows(
    memory: torch.Tensor,
    buffer: torch.Tensor,
    place: torch.Tensor,
    width: int,
    before: int,
    *,
    back: bool,
) -> None:
    """Copy used rows of uint8 ``memory`` ``[rows, bytes]`` to the buffer of a stash, or back.

    ``width`` is the bytes of a row of the buffer, of which ``before`` are of other tensors.
    """
    size = memory.shape[1]
    words = memory.view(-1).view(_WORDS[_word(size)])
    grid = max(1, min(_KEPT_PROGRAMS, triton.cdiv(len(words), _KEPT_BLOCK)))
    of_row = size // words.itemsize
    _move[grid,](words, buffer, place, width, before, of_row, BACK=back, BLOCK=_KEPT_BLOCK)


@triton.jit(do_not_specialize=["before"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    words, buffer, place, width, before, WORDS, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    start, used = tl.load(place), tl.load(place + 3)
    padded = tl.load(place + 2) - tl.load(place + 1)
    begin = buffer.to(tl.int64) + start * width + padded * before
    kept = tl.multiple_of(begin.to(words.dtype), 16)
    count = used * WORDS
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    fits = start >= 0
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < count:
        word = first + tl.arange(0, BLOCK)
        inside = word < count
        if BACK:
            tl.store(words + word, tl.load(kept + word, mask=inside & fits, other=0), mask=inside)
        else:
            tl.store(kept + word, tl.load(words + word, mask=inside), mask=inside & fits)
        first += step
