"""Fakes of what Transformer Engine multiplies for experts and routers (2.20.2), for bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cg.moe.grouped_gemm import GroupedGemm
from megatron_cg.tools.cpu.grouped_linear import SETTINGS
from megatron_cg.tools.plan.fakes.base import TransformerEngineBaseModule, applied, refused
from megatron_cg.tools.plan.trace import launched


class GroupedLinear(TransformerEngineBaseModule):
    """``module/grouped_linear.py``: ``weight0`` to ``weightN`` of the local experts."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "meta",
        single_grouped_weight: bool = False,
        **_settings: Any,
    ) -> None:
        super().__init__()
        if single_grouped_weight:
            raise refused("one tensor for all experts' weights")
        self.num_gemms = num_gemms
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(num_gemms):
            shapes[f"weight{index}"] = (self.out_features, self.in_features)
            if bias:
                shapes[f"bias{index}"] = (self.out_features,)
        self.add_parameters(params_dtype, device, **shapes)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Tensor:
        """As TE's, for any split of the tokens; a tensor has the counts on the device."""
        if self.use_bias:
            raise refused("biases of experts in a graph")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        if isinstance(m_splits, Tensor):
            given = (m_splits, SETTINGS, None, None)
            return applied(GroupedGemm, inp, *given, *weights)[0]
        fused = self.fuse_wgrad_accumulation
        return applied(_GroupedLinear, inp, fused, *weights)


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: Tensor | None = None,
    **_settings: Any,
) -> tuple[Any, ...]:
    """``cpp_extensions/gemm.py``: a new tensor; TE's own workspace is not in the graph's pool."""
    launched(1)
    if out is None:
        inner_a, inner_b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
        width = inner_a.shape[0] if layout[0] == "T" else inner_a.shape[1]
        rows = inner_b.shape[0] if layout[1] == "N" else inner_b.shape[1]
        shape = (*B.shape[:-1], width) if layout[1] == "N" else (rows, width)
        out = B.new_empty(shape, dtype=out_dtype or B.dtype)
    return out, None, None, None


class _GroupedLinear(torch.autograd.Function):
    """``module/grouped_linear.py``: one input for all experts, and one weight per expert."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        """``inp`` [tokens, in] and weights [out, in] give [tokens, out]."""
        rows = inp.reshape(-1, weights[0].shape[1])
        launched(len(weights))
        ctx.save_for_backward(rows, *weights)
        ctx.fused = fused
        return rows.new_empty((*inp.shape[:-1], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input and weights."""
        _, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        launched(2 * len(weights))
        d_input = gradient.new_empty((*gradient.shape[:-1], weights[0].shape[1]))
        return d_input, None, *(None if ctx.fused else torch.empty_like(w) for w in weights)
