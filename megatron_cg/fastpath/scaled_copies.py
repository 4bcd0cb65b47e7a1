"""Gradients that are scaled while they are copied into their bucket.

Megatron-FSDP scales a whole bucket by ``1 / ranks`` before it reduces it: one more pass over all
gradients. Here the copy scales, and for the reduction the bucket has no factor.

Note [Same bits]
    A copy does not round, so a scaled copy rounds as the scaling of the copy does. A sum is rounded
    to the bucket's dtype before it is scaled, also in one kernel. Megatron-FSDP scales a bucket as
    a whole, so one call must bring the gradients of all its parameters, as a graph of a whole layer
    does for those of the experts. The padding between parameters is not scaled; nothing reads it.

Note [Runs]
    Weight gradients of a grouped GEMM lie side by side, as do their places in the bucket, so they
    are copied as one. Only addresses tell that: each gradient in a graph's memory is a tensor
    without an owner and has a storage of its own, both TE's and those of the native backend. A
    launch costs the host what a pass over ``_WORTH_A_LAUNCH`` costs the GPU. So with more launches
    than the bytes are worth, instead of the one of a fused copy, the bucket is left to
    Megatron-FSDP.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cg.fsdp.roles import fsdp_class, fsdp_function

Run = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Parts of a bucket and the gradients for them, in memory without a gap."""
_FEW_RUNS, _WORTH_A_LAUNCH = 4, 16 << 20
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPLACES = (
    *fsdp_function(
        "GradReducePipeline._bucket_group_gradient_reduce",
        "what scales and reduces buckets",
        fingerprints=("0a0a7e732aee5bc3",),
    ),
    *fsdp_function(
        "gradient_reduce_preprocessing", "what scales", fingerprints=("1ff2d838cca56aba",)
    ),
)
RELIES_ON = (
    *REPLACES,
    *fsdp_class("DataParallelBuffer", "gradient_scaling_factor", "ddp_config"),
    *fsdp_class("ParamAndGradBuffer", "bucket_to_bucket_group"),
)


def factor_of(store: Any, number: int, buffer: Any, dtype: torch.dtype) -> float | None:
    """The factor by which Megatron-FSDP multiplies a bucket; None if only it can.

    ``store`` is the model's ``ParamAndGradBuffer``, ``buffer`` has the gradients of this bucket.
    """
    config, comm_dtype = buffer.ddp_config, store.mp_policy.grad_comm_dtype
    in_nccl = config.average_in_collective or (
        config.gradient_reduce_div_fusion and dtype is not torch.bfloat16
    )
    is_copied = not buffer.is_data_distributed and comm_dtype not in (None, dtype)
    together = len(store.bucket_to_bucket_group[number]) > 1
    if in_nccl or is_copied or together or dtype not in _DTYPES:
        return None
    factor: float | None = buffer.gradient_scaling_factor
    return factor


def runs_of(pieces: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[Run] | None:
    """What is side by side, as one; None if Megatron-FSDP must scale, see Note [Runs]."""
    dtype = pieces[0].dtype
    runs: list[Run] = []
    size, ends = 0, (-1, -1)
    for piece, gradient in zip(pieces, gradients, strict=True):
        for tensor in (piece, gradient):
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                return None
        begins = piece.data_ptr(), gradient.data_ptr()
        if begins != ends:
            runs.append(([], []))
        for tensors, tensor in zip(runs[-1], (piece, gradient), strict=True):
            tensors.append(tensor)
        size += piece.nbytes
        ends = begins[0] + piece.nbytes, begins[1] + piece.nbytes
    return runs if len(runs) <= max(_FEW_RUNS, size // _WORTH_A_LAUNCH) else None


def copy_scaled(runs: Sequence[Run], factor: float, *, sums: bool) -> None:
    """Write the gradients times ``factor``; if ``sums``, of what is there and the gradients."""
    for pieces, gradients in runs:
        if pieces[0].is_cuda:
            from megatron_cg.fastpath.gradient_kernels import write_scaled

            count = sum(piece.numel() for piece in pieces)
            write_scaled(pieces[0], gradients[0], factor, count, sums=sums)
            continue
        if sums:
            torch._foreach_add_(pieces, gradients)
        else:
            torch._foreach_copy_(pieces, gradients)
        torch._foreach_mul_(pieces, factor)
