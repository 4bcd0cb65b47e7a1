"""A grouped GEMM that takes its row counts from the device.

Transformer Engine's grouped GEMM reads the counts on the host and launches one GEMM per expert.
This one launches one kernel for all experts, and its counts may be the result of a kernel. So a
graph can hold it: a replay uses the counts of that replay.

Note [Rows without an expert]
    ``rows`` may have more rows than all counts add up to. ``grouped_mm`` neither reads them nor
    writes their results: these stay uninitialized and may be NaN. Nothing of them reaches a
    result. The operations between two grouped GEMMs work row by row; weight gradients sum over
    the counted rows; and the exchange of tokens sends the counted rows.

Note [Transformer Engine's contract]
    ``GroupedLinear.forward`` of Transformer Engine looks up ``_GroupedLinear`` in its module for
    each call. :class:`GroupedGemm` has the same arguments and results, so that the module, its
    parameters and Megatron's classes above it stay as they are, and so that the fast path can
    detach its weights from autograd as it does for Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from megatron_cg.moe.one_tensor import as_one


def ends_of(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where each expert's rows end: int32 ``[experts]`` on ``device``."""
    ends = counts.cumsum(0).to(torch.int32)
    if ends.device != device:
        # From pinned memory the copy does not wait for the device.
        ends = ends.pin_memory().to(device, non_blocking=True)
    return ends


class GroupedGemm(torch.autograd.Function):
    """Row ``i`` times the weight of its expert; see Note [Transformer Engine's contract]."""

    @staticmethod
    def forward(  # noqa: PLR0917 - Transformer Engine's arguments
        ctx: Any,
        inp: torch.Tensor,
        m_splits: torch.Tensor,
        non_tensor_args: Any,
        out: Any,
        dgrad_out: Any,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, list[None]]:
        """``[rows, in]`` and weights ``[out, in]`` give ``[rows, out]``, and no FP8 copies.

        ``m_splits`` is int64 ``[experts]``: rows of each expert, on any device.
        """
        experts = len(m_splits)
        weights = weights_and_biases[:experts]
        rows = inp.reshape(-1, inp.shape[-1])
        ends = ends_of(m_splits, rows.device)
        result = grouped_mm(rows, as_one(weights).transpose(1, 2), offs=ends)
        if ctx is not None:
            ctx.save_for_backward(rows, ends, *weights)
            ctx.shape = inp.shape
            ctx.needed = inp.requires_grad, any(one.requires_grad for one in weights)
            ctx.unused = len(weights_and_biases) - experts
        return result.view(*inp.shape[:-1], result.shape[-1]), [None] * experts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the rows and, as views of one tensor, of the weights."""
        rows, ends, *weights = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        of_rows, of_weights = ctx.needed
        d_rows = grouped_mm(gradient, as_one(weights), offs=ends) if of_rows else None
        d_weights: Any = [None] * len(weights)
        if of_weights:
            d_weights = grouped_mm(gradient.t(), rows, offs=ends).unbind(0)
        d_input = d_rows.view(ctx.shape) if d_rows is not None else None
        return (d_input, None, None, None, None, *d_weights, *[None] * ctx.unused)
