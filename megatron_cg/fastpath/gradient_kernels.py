"""Kernels for gradients. Importing this needs Triton."""

from __future__ import annotations

import torch
import triton
from triton import language as tl

_BLOCK = 4096


def add_scaled(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """``target.add_(source).mul_(factor)`` in one pass, with the same two roundings.

    Both are contiguous and of one floating dtype of at most 32 bits.
    """
    count = target.numel()
    _add_scaled[(triton.cdiv(count, _BLOCK),)](
        target.view(-1), source.view(-1), factor, count, BLOCK=_BLOCK, num_warps=8
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_scaled(target, source, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    one = tl.load(target + place, mask=inside)
    other = tl.load(source + place, mask=inside)
    total = (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)
    tl.store(target + place, (total.to(tl.float32) * factor).to(one.dtype), mask=inside)
