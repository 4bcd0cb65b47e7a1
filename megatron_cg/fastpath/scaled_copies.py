"""Gradients that are scaled while they are copied into their bucket.

Megatron-FSDP scales a whole bucket by ``1 / ranks`` before it reduces it: one more pass over all
gradients. Here the copy scales, and for the reduction the bucket has no factor.

Note [Same bits]
    A copy does not round, so a scaled copy rounds as the scaling of the copy does. A sum is rounded
    to the bucket's dtype before it is scaled, also in one kernel. Megatron-FSDP scales a bucket as
    a whole, so one call must bring the gradients of all its parameters, as a graph of a whole layer
    does for those of the experts. The padding between parameters is not scaled; nothing reads it.

Note [Runs]
    Weight gradients of a grouped GEMM are views of one tensor, and their places in the bucket are
    side by side. So they are copied as one. With more than ``_MOST_RUNS`` launches instead of the
    one of a fused copy, the host would lose what the GPU gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_cg.fsdp.fsdp_symbols import fsdp_class, fsdp_function

_MOST_RUNS = 4
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
Run = tuple[torch.Tensor, torch.Tensor]
"""A part of a bucket and the gradients for it, both contiguous."""


def factor_of(store: Any, number: int, buffer: Any, dtype: torch.dtype) -> float | None:
    """The factor by which Megatron-FSDP multiplies a bucket; None if only it can.

    Args:
        store: the model's ``ParamAndGradBuffer``.
        number: the bucket's.
        buffer: its buffer of gradients.
        dtype: of its gradients.
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
    runs: list[list[Any]] = []
    ends: tuple[Any, ...] = ()
    for pair in zip(pieces, gradients, strict=True):
        if any(tensor.dtype is not dtype or not tensor.is_contiguous() for tensor in pair):
            return None
        begins = tuple((t.untyped_storage()._cdata, t.storage_offset()) for t in pair)
        if begins != ends:
            runs.append([*pair, 0])
            if len(runs) > _MOST_RUNS:
                return None
        size = pair[0].numel()
        runs[-1][2] += size
        ends = tuple((storage, begin + size) for storage, begin in begins)
    return [(to.as_strided((n,), (1,)), own.as_strided((n,), (1,))) for to, own, n in runs]


def copy_scaled(runs: Sequence[Run], factor: float, *, sums: bool) -> None:
    """Write the gradients times ``factor``; if ``sums``, of what is there and the gradients."""
    for piece, gradient in runs:
        if not sums:
            torch.mul(gradient, factor, out=piece)
        elif piece.is_cuda:
            from megatron_cg.fastpath.gradient_kernels import add_scaled

            add_scaled(piece, gradient, factor)
        else:
            piece.add_(gradient).mul_(factor)
