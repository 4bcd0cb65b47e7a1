"""Kernels of the exchange through the memory of other GPUs. Importing this needs Triton.

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


def write_rows(
    rows: torch.Tensor, places: torch.Tensor, addresses: torch.Tensor, rank: int, count: int
) -> None:
    """Write each row to its place in the slots of this rank on the other rank that gets it.

    Args:
        rows: ``[rows, width]``, contiguous.
        places: int64 ``[rows]``: the rank that gets the row, times the rows of a slot, plus its
            number in the slot. A row of this rank, or with ``count`` or more, goes nowhere.
        addresses: int64 ``[ranks]``: where the slots of each rank begin, in bytes.
        rank: of this process, from 0.
        count: rows of all slots of a rank.
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
    """Read the rows that this rank received, in the order of ``places``.

    Args:
        slots: uint8 ``[places, bytes of a row]``.
        rows: ``[sent rows, width]``, contiguous: what this rank sent.
        packed: int64 ``[places]``: of each place in the slots of what it sent, its row.
        places: int64 ``[rows]``: where each row lies in the slots; zero if in none.
        used: int64 ``[1]``: how many rows are read. The others are not initialized.
        rank: of this process, from 0.
        slot: rows of a slot.
    """
    received = rows.new_empty(len(places), rows.shape[1])
    words, grid, sizes = _tiles(received, slots, rows)
    _read[grid](*words, packed, places, used, rank, slot, len(packed), **sizes)
    return received


def _tiles(rows: torch.Tensor, *others: torch.Tensor) -> tuple[Any, tuple[int], dict[str, int]]:
    """All of them as words, programs for ``rows``, and what a kernel is compiled for."""
    size = rows.shape[1] * rows.element_size()
    word = next(word for word in _WORDS if size % word == 0)
    words = [tensor.view(_WORDS[word]) for tensor in (rows, *others)]
    width = size // word
    block = min(_TILE, triton.next_power_of_2(width))
    aligned = size % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in words)
    sizes = {"WIDTH": width, "WORD": word, "ALIGNED": 16 if aligned else word}
    sizes |= {"ROWS": _TILE // block, "BLOCK": block}
    return words, (triton.cdiv(len(rows), sizes["ROWS"]),), sizes


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
