"""Kernels for gradients. Importing this needs Triton."""

import torch
import triton
from triton import language as tl

_BLOCK = 4096


def write_scaled(
    target: torch.Tensor, source: torch.Tensor, factor: float, count: int, *, sums: bool
) -> None:
    """``target.copy_(source).mul_(factor)`` in one pass, with the same bits; ``sums``: ``add_``.

    Of ``count`` elements from the first one of each, which may go on in other tensors behind. Both
    are contiguous and of one floating dtype of at most 32 bits.
    """
    blocks = (triton.cdiv(count, _BLOCK),)
    _write_scaled[blocks](target, source, factor, count, SUMS=sums, BLOCK=_BLOCK, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _write_scaled(  # type: ignore[no-untyped-def] # noqa: PLR0917 - a kernel's
    target, source, factor, count, SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(source + place, mask=inside)
    if SUMS:
        one = tl.load(target + place, mask=inside)
        value = (one.to(tl.float32) + value.to(tl.float32)).to(one.dtype)
    tl.store(target + place, (value.to(tl.float32) * factor).to(value.dtype), mask=inside)
