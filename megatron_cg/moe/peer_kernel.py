"""The kernel that writes rows to the memory of other GPUs. Importing this needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""A row is moved as words of the first of these sizes that divides it."""
_BLOCK = 512


def write_rows(
    rows: torch.Tensor, places: torch.Tensor, addresses: torch.Tensor, rank: int, count: int
) -> None:
    """Write each row to its place in the slots of this rank on the rank that gets it.

    Args:
        rows: ``[rows, width]``, contiguous.
        places: int64 ``[rows]``: the rank that gets the row, times the rows of a slot, plus its
            number in the slot. A row with ``count`` or more goes nowhere.
        addresses: int64 ``[ranks]``: where the slots of each rank begin, in bytes.
        rank: of this process, from 0.
        count: rows of all slots of a rank.
    """
    size = rows.shape[1] * rows.element_size()
    word = next(word for word in _WORDS if size % word == 0)
    width = size // word
    kernel: Any = _write
    kernel[(len(rows),)](
        rows.view(_WORDS[word]),
        places,
        addresses,
        rank * (count // len(addresses)),
        count // len(addresses),
        count,
        WIDTH=width,
        WORD=word,
        ALIGNED=16 if size % 16 == 0 else word,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    rows,
    places,
    addresses,
    first,
    slot,
    count,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. ``first`` is where the slot of this rank begins on each rank, in rows."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place < count:
        begin = tl.load(addresses + place // slot) + (first + place % slot) * WIDTH * WORD
        target = tl.multiple_of(begin.to(tl.pointer_type(rows.dtype.element_ty)), ALIGNED)
        for start in range(0, WIDTH, BLOCK):
            word = start + tl.arange(0, BLOCK)
            inside = word < WIDTH
            tl.store(target + word, tl.load(rows + row * WIDTH + word, mask=inside), mask=inside)
