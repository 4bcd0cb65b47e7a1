"""Fakes of Transformer Engine's linear layers and norms (transformer-engine 2.20.2).

The autograd functions are for bfloat16 without userbuffers, quantization or a debugger.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_cg.tools.plan.fakes.base import TransformerEngineBaseModule, applied, like, refused
from megatron_cg.tools.plan.trace import launched, scratch

MULTIPROCESSORS = 132
"""Number of an H200; TE's norms keep one partial sum of a weight's gradient for each."""


class Linear(TransformerEngineBaseModule):
    """``module/linear.py``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "meta",
        normalization: str | None = None,
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.normalization = bias, return_bias, normalization
        shapes: dict[str, tuple[int, ...]] = {}
        if normalization is not None:
            shapes["layer_norm_weight"] = (self.in_features,)
        if normalization not in (None, "RMSNorm"):
            shapes["layer_norm_bias"] = (self.in_features,)
        shapes["weight"] = (self.out_features, self.in_features)
        if bias:
            shapes["bias"] = (self.out_features,)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype)
        self.add_parameters(params_dtype, device, **shapes)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As TE's: the output, together with the bias if requested."""
        parallel = _Parallel(
            self.parallel_mode, self.tp_size, self.sequence_parallel, self.fuse_wgrad_accumulation
        )
        bias = self.bias if self.use_bias and not self.return_bias else None
        norm = (getattr(self, f"layer_norm_{name}", None) for name in ("weight", "bias"))
        out = applied(_Linear, inp, parallel, *norm, self.weight, bias)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """``module/layernorm_linear.py``."""

    def __init__(self, *args: Any, normalization: str = "LayerNorm", **settings: Any) -> None:
        if settings.get("return_layernorm_output"):
            raise refused("return_layernorm_output")
        super().__init__(*args, normalization=normalization, **settings)


class RMSNorm(nn.Module):
    """``ops/basic/rmsnorm.py`` by way of ``module/rmsnorm.py``."""

    names: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        device: Any = "meta",
        params_dtype: torch.dtype | None = None,
        sequence_parallel: bool | None = None,
        **_settings: Any,
    ) -> None:
        super().__init__()
        for name in self.names:
            empty = torch.empty(normalized_shape, dtype=params_dtype, device=device)
            parameter = nn.Parameter(empty)
            parameter.sequence_parallel = bool(sequence_parallel)  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, inp: Tensor) -> Tensor:
        """The input's shape."""
        return applied(_Norm, inp, self.weight, self._parameters.get("bias"))


class LayerNorm(RMSNorm):
    """``ops/basic/layer_norm.py`` by way of ``module/layernorm.py``."""

    names = ("weight", "bias")


class _Parallel(NamedTuple):
    """How a linear layer is partitioned; ``parts`` is the size of the tensor-parallel group."""

    mode: str | None
    parts: int
    sequence: bool
    """Whether each rank has only its part of the rows outside of the layer."""
    fused: bool
    """Whether TE adds weights' gradients to ``main_grad`` itself."""


class _Norm(torch.autograd.Function):
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


class _Linear(torch.autograd.Function):
    """``module/linear.py`` and, given a norm's weight, ``module/layernorm_linear.py``.

    The first saves its input before any gathering. The second saves its input, the normed input,
    which its backward pass gathers again, and the statistics.
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, parallel: _Parallel, *parameters: Tensor | None) -> Tensor:
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


def _product(rows: Tensor, weight: Tensor, parallel: _Parallel) -> Tensor:
    whole = _gathered(rows, parallel) if parallel.mode == "column" else rows
    launched(1)
    out = whole.new_empty((whole.shape[0], weight.shape[0]))
    del whole
    return _reduced(out, parallel) if parallel.mode == "row" else out


def _product_gradients(
    gradient: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, parallel: _Parallel
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


def _gathered(rows: Tensor, parallel: _Parallel) -> Tensor:
    """``gather_along_first_dim`` with sequence parallelism: a new tensor of all ranks' rows."""
    if not parallel.sequence:
        return rows
    launched(1)
    return rows.new_empty((rows.shape[0] * parallel.parts, *rows.shape[1:]))


def _reduced(rows: Tensor, parallel: _Parallel) -> Tensor:
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
