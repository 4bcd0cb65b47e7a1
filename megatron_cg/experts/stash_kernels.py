"""The kernel that moves rows which experts keep (``stash.py``). Importing this needs Triton."""

import torch
import triton
from triton import language as tl

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Rows are moved as words of the first of these that divides them."""
_BLOCK, _PROGRAMS = 2048, 1056
"""Words that a program moves at a time, and programs at most: they stop at the used rows."""


def move(
    memory: torch.Tensor,
    buffer: torch.Tensor,
    place: torch.Tensor,
    width: int,
    before: int,
    *,
    back: bool,
) -> None:
    """Copy used rows of uint8 ``memory`` ``[rows, bytes]`` to the buffer, or back.

    ``width`` is the bytes of a row of the buffer, of which ``before`` are of other tensors.
    """
    size = memory.shape[1]
    words = memory.view(-1).view(next(word for word in _WORDS if size % word.itemsize == 0))
    grid = max(1, min(_PROGRAMS, triton.cdiv(len(words), _BLOCK)))
    _move[grid,](
        words, buffer, place, width, before, size // words.itemsize, BACK=back, BLOCK=_BLOCK
    )


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
