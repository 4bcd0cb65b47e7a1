"""Gradients that are scaled while they are copied into their bucket.

Megatron-FSDP multiplies a whole bucket by ``1 / ranks`` before it reduces it: another pass over all
gradients, beside the backward pass of the next unit. Here the copy scales, and for the reduction
the bucket has no factor.

Note [Same bits]
    A copy does not round, so a scaled copy rounds as the scaling of the copy does. A sum is rounded
    to the bucket's dtype before it is scaled, also in one kernel. Megatron-FSDP scales a bucket as
    a whole, so one call must bring the gradients of all its parameters, as a graph of a whole layer
    does for those of the experts. The padding between parameters is not scaled; nothing reads it.

Note [Addresses of graphs]
    Gradients of a graph and the buckets that they go to are at a few addresses. For each, a table
    of all copies is made once, and one launch makes them. With more addresses, as of memory that is
    allocated anew, gradients are copied as without this part.
"""

from typing import Any

import torch

from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function

_TABLES = 16
"""At most so many of one operation's gradients in one bucket."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PIPELINE = "GradReducePipeline"
_READY, _REDUCE = "get_ready_bucket_group_for_reduction", "_bucket_group_gradient_reduce"
REPLACES = (
    *fsdp_function(f"{_PIPELINE}.reduce_gradients", "what reduces a bucket", "f77dd997162c6fac"),
    *fsdp_function(f"{_PIPELINE}.{_READY}", "what says which one", "2dc8b854f1c1cd1a"),
    *fsdp_function(f"{_PIPELINE}.{_REDUCE}", "what scales and reduces it", "0a0a7e732aee5bc3"),
    *fsdp_function("gradient_reduce_preprocessing", "what scales", "1ff2d838cca56aba"),
)
RELIES_ON = (
    *REPLACES,
    *fsdp_class("DataParallelBuffer", "gradient_scaling_factor", "ddp_config"),
    *fsdp_class("ParamAndGradBuffer", "bucket_to_bucket_group", "mp_policy"),
)


def require_kernel(like: torch.Tensor) -> None:
    """Raise NotApplicableError if the kernel does not run where ``like`` is, on a GPU."""
    if not like.is_cuda:
        return
    try:
        one = like.new_zeros(1)
        ScaledCopies().copy([one], [one.clone()], 1.0, sums=False)
    except Exception as error:  # As without Triton, or the C compiler for its first launch.
        raise NotApplicableError(f"Triton cannot run a kernel: {error}") from error


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


class ScaledCopies:
    """Copies one operation's gradients to one bucket; see Note [Addresses of graphs]."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], Any] = {}

    def copy(
        self,
        pieces: list[torch.Tensor],
        gradients: list[torch.Tensor],
        factor: float,
        *,
        sums: bool,
    ) -> bool:
        """Write gradients times ``factor`` to the bucket's pieces; False if nothing was done.

        Gradients are of one dtype. If ``sums``, writes the sums of what is there and the gradients.
        """
        if not pieces[0].is_cuda:
            (torch._foreach_add_ if sums else torch._foreach_copy_)(pieces, gradients)
            for piece in pieces:  # ``_foreach_mul_`` rounds the factor to their dtype on a CPU.
                piece.mul_(factor)
            return True
        first = pieces[0]
        if gradients[0].dtype is not first.dtype or not all(g.is_contiguous() for g in gradients):
            return False
        # The pieces of a bucket are always at the same distances.
        key = (first.dtype, first.data_ptr(), *[gradient.data_ptr() for gradient in gradients])
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) == _TABLES:
                return False
            from megatron_cg.fastpath.gradient_kernels import Table

            table = self._tables[key] = Table(pieces, gradients)
        table.write(pieces, factor, sums=sums)
        return True
