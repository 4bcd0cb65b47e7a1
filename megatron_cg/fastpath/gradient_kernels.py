"""A copy of all gradients of a bucket that also scales them, in one launch.

Importing this needs Triton.
"""

from collections.abc import Sequence

import torch
import triton
from triton import language as tl

_CHUNK, _BLOCK = 1 << 15, 4096
"""Elements that a program copies, and those that it copies at a time."""


class Table:
    """Where the elements of tensors go. All are contiguous and of one dtype of at most 32 bits.

    It has addresses, and keeps no tensor alive.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        rows = [
            (target.data_ptr() + begin, source.data_ptr() + begin, target.nbytes - begin)
            for target, source in zip(targets, sources, strict=True)
            for begin in range(0, target.nbytes, _CHUNK * target.itemsize)
        ]
        self._aligned = 16 if all(number % 16 == 0 for row in rows for number in row) else 1
        self._rows = torch.tensor(rows, dtype=torch.int64, device=targets[0].device)

    def write(self, targets: Sequence[torch.Tensor], factor: float, *, sums: bool) -> None:
        """``target.copy_(source).mul_(factor)``, or with ``add_`` if ``sums``: the same bits."""
        like = targets[0]
        _write_scaled[len(self._rows),](
            self._rows,
            like,
            factor,
            SUMS=sums,
            SIZE=like.itemsize,
            ALIGNED=self._aligned,
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
            num_warps=8,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _write_scaled(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    rows,
    like,
    factor,
    SUMS: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * 3
    target = tl.multiple_of(tl.load(row).to(like.dtype), ALIGNED)
    source = tl.multiple_of(tl.load(row + 1).to(like.dtype), ALIGNED)
    count = tl.multiple_of(tl.load(row + 2), ALIGNED) // SIZE
    for start in range(0, CHUNK, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        value = tl.load(source + place, mask=inside)
        if SUMS:
            one = tl.load(target + place, mask=inside)
            value = (one.to(tl.float32) + value.to(tl.float32)).to(one.dtype)
        tl.store(target + place, (value.to(tl.float32) * factor).to(value.dtype), mask=inside)
