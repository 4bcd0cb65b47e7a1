"""Keeps torch's fused RMSNorm in code for GPUs.

Note [Operations that only GPUs have]
    ``aten::_fused_rms_norm`` has a kernel for CUDA, and torch's own decomposition for devices
    without a kernel (torch 2.11, 2.15). The meta device is one of them. So its trace has the
    separate operations, which round elsewhere than the kernel of an eager pass. With a kernel for
    the meta device, which computes shapes alone, torch keeps the operation. No other operation is
    like it: all others with such a decomposition and a CUDA kernel have one for CPUs too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cg.upstream.symbols import Symbol

_NAME = "_fused_rms_norm"
_HAS_KERNEL = Symbol(
    "torch",
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "whether an operation has a kernel for a device",
)
_OPERATION = Symbol("torch", f"torch.ops:aten.{_NAME}", "RMSNorm as one operation")
RELIES_ON = (_HAS_KERNEL, _OPERATION)


@contextmanager
def fused_norms_kept() -> Iterator[None]:
    """Trace RMSNorm as the one operation that runs on a GPU; see the note above."""
    _OPERATION.find()
    if _HAS_KERNEL.find()(f"aten::{_NAME}", "Meta"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    implementation: Any = library.m
    # Library.impl refuses the meta device where torch has a decomposition.
    implementation.impl(_NAME, "Meta", _shapes, False)
    try:
        yield
    finally:
        library._destroy()


def _shapes(
    given: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs like those of the CUDA kernel: the result, and the reciprocal deviation.

    In a trace it is enough that this is there: torch takes the shapes from its own decomposition.
    """
    rows = given.shape[: given.dim() - len(normalized_shape)]
    kept = [*rows, *(1 for _ in normalized_shape)]
    dtype = torch.promote_types(given.dtype, torch.float32)
    return given.new_empty(given.shape), given.new_empty(kept, dtype=dtype)
