"""Fakes of Transformer Engine's and mamba-ssm's autograd functions on the meta device.

Each has the inputs and outputs of its original, saves the same tensors for the backward pass,
allocates the same temporary memory in the same order, and counts the kernels that the original
launches. No value is computed. The facts come from transformer-engine 2.20.2, each with its source,
for bfloat16 without userbuffers, quantization or a debugger; and from mamba-ssm 2.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cg.tools.plan.trace import launched, scratch


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """``function.apply``, which torch does not type."""
    apply: Any = function.apply
    return apply(*inputs)


class Parallel(NamedTuple):
    """How a linear layer is partitioned; ``parts`` is the size of the tensor-parallel group."""

    mode: str | None
    parts: int
    sequence: bool
    fused: bool
    """Whether TE adds weights' gradients to ``main_grad`` itself."""


MULTIPROCESSORS = 132
"""Number of an H200; TE's norms keep one partial sum of a weight's gradient for each."""


def _norm_scratch(rows: int, width: int, partials: int) -> None:
    """Workspace of TE's norm backward: ``common/normalization/*``, ``dgamma_part`` in float32."""
    scratch(partials * min(MULTIPROCESSORS, rows) * width * 4)


def _cleared(*tensors: Tensor) -> None:
    """``utils.py``, ``clear_tensor_data``: free the memory before the backward pass ends."""
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)


def _weight_gradient(weight: Tensor, fused: bool) -> Tensor | None:
    """The gradient for a weight: bfloat16, or None if TE writes ``main_grad`` itself."""
    return None if fused else torch.empty_like(weight)


def gathered(tensor: Tensor, parts: int) -> Tensor:
    """``gather_along_first_dim``: a new tensor, ``parts`` times as long."""
    if parts == 1:
        return tensor
    launched(1)
    return tensor.new_empty((tensor.shape[0] * parts, *tensor.shape[1:]))


def _reduced(tensor: Tensor, parallel: Parallel) -> Tensor:
    """Sum over the tensor-parallel ranks: scattered with sequence parallelism, else in place."""
    if parallel.parts == 1:
        return tensor
    if parallel.sequence:
        return scattered(tensor, parallel.parts)
    launched(1)
    return tensor


def scattered(tensor: Tensor, parts: int) -> Tensor:
    """``reduce_scatter_along_first_dim``: a new tensor with the length divided by ``parts``."""
    if parts == 1:
        return tensor
    launched(1)
    return tensor.new_empty((tensor.shape[0] // parts, *tensor.shape[1:]))


class Norm(torch.autograd.Function):
    """``ops/basic/rmsnorm.py`` and ``layer_norm.py``: keeps the input and its row statistics."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The last dimension is the weight's; the output has the input's shape."""
        rows = inp.contiguous().view(-1, weight.numel())
        launched(1)
        out = torch.empty_like(rows)
        statistics = [rows.new_empty(rows.shape[0], dtype=torch.float32)]
        if bias is not None:
            statistics.append(rows.new_empty(rows.shape[0], dtype=torch.float32))
        ctx.save_for_backward(rows, weight, *statistics)
        ctx.has_bias = bias is not None
        return out.view(inp.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input, weight and bias."""
        rows, weight, *statistics = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        launched(2)
        d_input = torch.empty_like(rows)
        d_weight = torch.empty_like(weight)
        d_bias = torch.empty_like(weight) if ctx.has_bias else None
        _norm_scratch(rows.shape[0], rows.shape[1], 1 + ctx.has_bias)
        _cleared(rows, *statistics)
        return d_input.view(gradient.shape), d_weight, d_bias


class Linear(torch.autograd.Function):
    """``module/linear.py``, ``_Linear``: saves its input before any gathering."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel
    ) -> Tensor:
        """``inp`` [s, b, in] and ``weight`` [out, in] give [s', b, out]."""
        rows = inp.reshape(-1, weight.shape[1])
        gathers = parallel.mode == "column" and parallel.sequence
        whole = gathered(rows, parallel.parts) if gathers else rows
        launched(1)
        out = whole.new_empty((whole.shape[0], weight.shape[0]))
        del whole
        if parallel.mode == "row":
            out = _reduced(out, parallel)
        ctx.save_for_backward(rows, weight, bias)
        ctx.settings = (inp.shape, parallel)
        return out.view(-1, *inp.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input, weight and bias."""
        rows, weight, bias = ctx.saved_tensors
        shape, parallel = ctx.settings
        gradient = gradients[0].reshape(-1, weight.shape[0])
        if parallel.mode == "row" and parallel.sequence:
            gradient = gathered(gradient, parallel.parts)
        column = parallel.mode == "column"
        whole = gathered(rows, parallel.parts) if column and parallel.sequence else rows
        launched(1)
        d_input = gradient.new_empty((gradient.shape[0], weight.shape[1]))
        if column:
            d_input = _reduced(d_input, parallel)
        launched(1)
        d_weight = _weight_gradient(weight, parallel.fused)
        d_bias = None if bias is None else torch.empty_like(bias)
        del whole
        return d_input.view(shape), d_weight, d_bias, None


class NormLinear(torch.autograd.Function):
    """``module/layernorm_linear.py``, ``_LayerNormLinear``: saves input, normed input, statistics.

    Always column parallel. The backward pass gathers the normed input again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        parallel: Parallel,
        *parameters: Tensor | None,
    ) -> Tensor:
        """``inp`` [s, b, in] gives [s', b, out].

        ``parameters`` are the norm's weight and bias, and the layer's weight [out, in] and bias.
        """
        norm_weight, norm_bias, weight, bias = parameters
        assert norm_weight is not None and weight is not None
        rows = inp.view(-1, weight.shape[1])
        launched(1)
        normed = torch.empty_like(rows)
        statistics = [rows.new_empty(rows.shape[0], dtype=torch.float32)]
        if norm_bias is not None:
            statistics.append(rows.new_empty(rows.shape[0], dtype=torch.float32))
        whole = gathered(normed, parallel.parts) if parallel.sequence else normed
        launched(1)
        out = whole.new_empty((whole.shape[0], weight.shape[0]))
        del whole
        ctx.save_for_backward(rows, norm_weight, norm_bias, weight, bias, normed, *statistics)
        ctx.settings = (inp.shape, parallel)
        return out.view(-1, *inp.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input, norm's weight and bias, weight, bias."""
        rows, norm_weight, norm_bias, weight, bias, normed, *statistics = ctx.saved_tensors
        shape, parallel = ctx.settings
        gradient = gradients[0].reshape(-1, weight.shape[0])
        whole = gathered(normed, parallel.parts) if parallel.sequence else normed
        launched(1)
        d_normed = gradient.new_empty((gradient.shape[0], weight.shape[1]))
        d_normed = _reduced(d_normed, parallel)
        launched(1)
        d_weight = _weight_gradient(weight, parallel.fused)
        d_bias = None if bias is None else torch.empty_like(bias)
        del whole
        _cleared(normed)
        launched(2)
        d_input = torch.empty_like(rows).view(shape)
        d_norm_weight = torch.empty_like(norm_weight)
        d_norm_bias = None if norm_bias is None else torch.empty_like(norm_bias)
        _norm_scratch(rows.shape[0], rows.shape[1], 1 + (norm_bias is not None))
        _cleared(*statistics)
        return d_input, None, d_norm_weight, d_norm_bias, d_weight, d_bias


class GroupedLinear(torch.autograd.Function):
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
        """Gradients of input and weights; the weights' gradients are parts of one tensor."""
        _, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        launched(2 * len(weights))
        d_input = gradient.new_empty((*gradient.shape[:-1], weights[0].shape[1]))
        return d_input, None, *(_weight_gradient(weight, ctx.fused) for weight in weights)


class FusedAttention(torch.autograd.Function):
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
        q, k, v, *_rest = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        del gradient
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        length, batch, heads, width = q.shape
        sums = batch * heads * length * 4
        if ctx.deterministic:
            scratch(sums + batch * heads * length * k.shape[0] * 2)
        else:
            scratch(sums + batch * heads * length * width * 4)
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


class Rotary(torch.autograd.Function):
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
