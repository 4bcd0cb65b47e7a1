"""Fakes of Transformer Engine's attention (transformer-engine 2.20.2), for bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cg.tools.plan.fakes.base import (
    NotLikened,
    TransformerEngineBaseModule,
    applied,
    refused,
)
from megatron_cg.tools.plan.trace import launched, scratch


class DotProductAttention(TransformerEngineBaseModule):
    """``attention/dot_product_attention``, with cuDNN's fused attention as its backend."""

    deterministic = False
    """Whether ``NVTE_ALLOW_NONDETERMINISTIC_ALGO`` is 0; set by the planner."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        cp_group: Any = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.refusal: NotLikened | None = None
        if softmax_type != "vanilla" or return_max_logit:
            self.refusal = refused("a softmax offset or the largest logits of attention")
        if cp_group is not None and cp_group.size() > 1:
            self.refusal = refused("context parallel attention")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_rest: Any, **_more: Any) -> Any:
        """Takes q [s, b, h, d], and k and v in the same form; returns [s, b, h * e]."""
        if self.refusal is not None:
            raise self.refusal
        given = _laid_out(query, key, value)
        out = applied(_FusedAttention, *given, self.deterministic)
        return out.view(out.shape[0], out.shape[1], -1)


def _laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``get_qkv_layout`` (``dot_product_attention/utils.py``): copies tensors of unknown layout.

    Of the layouts in one tensor, Megatron's q, k and v can have only heads side by side
    (``sbh3d``), if nothing changed them since they were split.
    """
    parts = (q, k, v)
    if (
        len({id(part.untyped_storage()) for part in parts}) == 1
        and len({(part.shape, part.stride()) for part in parts}) == 1
        and all(part.storage_offset() == i * q.shape[-1] for i, part in enumerate(parts))
    ):
        return parts
    return q.contiguous(), k.contiguous(), v.contiguous()


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, **_settings: Any) -> Tensor:
    """``attention/rope.py``, fused."""
    return applied(_Rotary, t, freqs)


class _FusedAttention(torch.autograd.Function):
    """``dot_product_attention/backends.py``, ``FusedAttnFunc``, cuDNN for any sequence length.

    Saves q, k, v, the output, the softmax's statistics (float32, [b, h, s, 1]) and the state of the
    random numbers (two int64). Its backward pass allocates, as cudnn-frontend's
    ``CompositeSDPABackwardNode``, the row sums of dO*O and an accumulator of dQ, both in float32.
    With deterministic kernels on Hopper, it allocates all of dS in bfloat16 instead of the
    accumulator.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, deterministic: bool) -> Tensor:
        """Of q [s, b, h, d], k [s', b, g, d], v [s', b, g, e]: [s, b, h, e]."""
        length, batch, heads, _ = q.shape
        launched(1)
        out = q.new_empty((length, batch, heads, v.shape[-1]))
        statistics = q.new_empty((batch, heads, length, 1), dtype=torch.float32)
        random_state = q.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, statistics, random_state)
        ctx.deterministic = deterministic
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of q, k and v; if they are parts of a packed tensor, so are the gradients."""
        q, k, v, *_ = ctx.saved_tensors
        gradients[0].contiguous()
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        length, batch, heads, width = q.shape
        per_row = k.shape[0] * 2 if ctx.deterministic else width * 4
        scratch(batch * heads * length * (4 + per_row))
        launched(3)
        return d_q, d_k, d_v, None


class Split(torch.autograd.Function):
    """``utils.py``, ``SplitAlongDim``: views; the gradients are concatenated in a new tensor."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, dim: int, sections: int | Sequence[int], squeeze: bool = False
    ) -> Any:
        """The parts of ``mixed`` along ``dim``."""
        ctx.dim = dim
        parts = torch.split(mixed, sections if isinstance(sections, int) else list(sections), dim)
        return tuple(part.squeeze(dim) for part in parts) if squeeze else parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of ``mixed``."""
        return torch.cat(gradients, dim=ctx.dim), None, None, None


class _Rotary(torch.autograd.Function):
    """``attention/rope.py``, ``FusedRoPEFunc``: a new tensor each way; saves only the table."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, table: Tensor) -> Tensor:
        """The input's shape."""
        launched(1)
        ctx.save_for_backward(table)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the input."""
        launched(1)
        return torch.empty_like(gradients[0], memory_format=torch.contiguous_format), None
