"""Fakes of Transformer Engine's autograd functions on the meta device.

Each has the inputs and outputs of its original, saves the same tensors for the backward pass,
allocates the same temporary memory in the same order, and counts the kernels that the original
launches. No value is computed. The facts come from transformer-engine 2.20.2, each with its source,
for bfloat16 without userbuffers, quantization or a debugger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cg.tools.plan.trace import launched, scratch

MULTIPROCESSORS = 132
"""Number of an H200; TE's norms keep one partial sum of a weight's gradient for each."""


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """``function.apply``, which torch does not type."""
    apply: Any = function.apply
    out: Tensor = apply(*inputs)
    return out


def like(tensor: Tensor | None) -> Tensor | None:
    """A new tensor such as ``tensor``, where there is one."""
    return None if tensor is None else torch.empty_like(tensor)


class Parallel(NamedTuple):
    """How a linear layer is partitioned; ``parts`` is the size of the tensor-parallel group."""

    mode: str | None
    parts: int
    sequence: bool
    """Whether each rank has only its part of the rows outside of the layer."""
    fused: bool
    """Whether TE adds weights' gradients to ``main_grad`` itself."""


class Norm(torch.autograd.Function):
    """``ops/basic/rmsnorm.py`` and ``layer_norm.py``: keeps the input and its row statistics."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The last dimension is the weight's; the output has the input's shape."""
        rows = inp.contiguous().view(-1, weight.numel())
        out, statistics = _normed(rows, bias)
        ctx.save_for_backward(rows, weight, bias, *statistics)
        return out.view(inp.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input, weight and bias."""
        rows, weight, bias, *statistics = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        d_rows, d_weight, d_bias = _norm_gradients(rows, weight, bias)
        _cleared(rows, *statistics)
        return d_rows.view(gradient.shape), d_weight, d_bias


class Linear(torch.autograd.Function):
    """``module/linear.py`` and, given a norm's weight, ``module/layernorm_linear.py``.

    The first saves its input before any gathering. The second saves its input, the normed input,
    which its backward pass gathers again, and the statistics.
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, parallel: Parallel, *parameters: Tensor | None) -> Tensor:
        """``inp`` [s, b, in] gives [s', b, out].

        ``parameters`` are the norm's weight and bias, and the layer's weight [out, in] and bias.
        """
        norm_weight, norm_bias, weight, _ = parameters
        assert weight is not None
        rows = inp.reshape(-1, weight.shape[1])
        normed, statistics = rows, list[Tensor]()
        if norm_weight is not None:
            normed, statistics = _normed(rows, norm_bias)
        out = _product(normed, weight, parallel)
        ctx.save_for_backward(rows, *parameters, normed, *statistics)
        ctx.settings = (inp.shape, parallel)
        return out.view(-1, *inp.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the input and the parameters."""
        rows, norm_weight, norm_bias, weight, bias, normed, *statistics = ctx.saved_tensors
        shape, parallel = ctx.settings
        gradient = gradients[0].reshape(-1, weight.shape[0])
        d_rows, d_weight, d_bias = _product_gradients(gradient, normed, weight, bias, parallel)
        d_norm_weight, d_norm_bias = None, None
        if norm_weight is not None:
            _cleared(normed)
            d_rows, d_norm_weight, d_norm_bias = _norm_gradients(rows, norm_weight, norm_bias)
            _cleared(*statistics)
        return d_rows.view(shape), None, d_norm_weight, d_norm_bias, d_weight, d_bias


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
        """Gradients of input and weights."""
        _, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        launched(2 * len(weights))
        d_input = gradient.new_empty((*gradient.shape[:-1], weights[0].shape[1]))
        return d_input, None, *(None if ctx.fused else torch.empty_like(w) for w in weights)


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


def _normed(rows: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The output of a norm, and each row's statistics in float32."""
    launched(1)
    out, number = torch.empty_like(rows), 1 + (bias is not None)
    return out, [rows.new_empty(rows.shape[0], dtype=torch.float32) for _ in range(number)]


def _norm_gradients(
    rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of rows, weight and bias.

    The workspace is that of ``common/normalization/*``: ``dgamma_part`` in float32.
    """
    launched(2)
    gradients = torch.empty_like(rows), torch.empty_like(weight), like(bias)
    count, width = rows.shape
    scratch((1 + (bias is not None)) * min(MULTIPROCESSORS, count) * width * 4)
    return gradients


def _product(rows: Tensor, weight: Tensor, parallel: Parallel) -> Tensor:
    whole = _gathered(rows, parallel) if parallel.mode == "column" else rows
    launched(1)
    out = whole.new_empty((whole.shape[0], weight.shape[0]))
    del whole
    return _reduced(out, parallel) if parallel.mode == "row" else out


def _product_gradients(
    gradient: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of rows, weight and bias; None for a weight whose ``main_grad`` TE adds to."""
    if parallel.mode == "row":
        gradient = _gathered(gradient, parallel)
    whole = _gathered(rows, parallel) if parallel.mode == "column" else rows
    launched(1)
    d_rows = gradient.new_empty((gradient.shape[0], weight.shape[1]))
    if parallel.mode == "column":
        d_rows = _reduced(d_rows, parallel)
    launched(1)
    d_weight, d_bias = None if parallel.fused else torch.empty_like(weight), like(bias)
    del whole
    return d_rows, d_weight, d_bias


def _gathered(rows: Tensor, parallel: Parallel) -> Tensor:
    """``gather_along_first_dim`` with sequence parallelism: a new tensor of all ranks' rows."""
    if not parallel.sequence:
        return rows
    launched(1)
    return rows.new_empty((rows.shape[0] * parallel.parts, *rows.shape[1:]))


def _reduced(rows: Tensor, parallel: Parallel) -> Tensor:
    """Sum over the tensor-parallel ranks: scattered with sequence parallelism, else in place."""
    if parallel.parts == 1:
        return rows
    launched(1)
    if not parallel.sequence:
        return rows
    return rows.new_empty((rows.shape[0] // parallel.parts, *rows.shape[1:]))


def _cleared(*tensors: Tensor) -> None:
    """``utils.py``, ``clear_tensor_data``: free the memory before the backward pass ends."""
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)
