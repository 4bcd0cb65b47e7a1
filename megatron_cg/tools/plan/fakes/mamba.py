"""Fakes of mamba-ssm's functions on the meta device, as those of Transformer Engine.

The facts come from mamba-ssm 2.3.2, ``ops/triton/ssd_combined.py`` and ``layernorm_gated.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_cg.tools.plan.fakes.base import applied, like
from megatron_cg.tools.plan.trace import launched


class _ChunkScan(torch.autograd.Function):
    """``MambaChunkScanCombinedFn``."""

    @staticmethod
    def forward(ctx: Any, chunk: int, *tensors: Any) -> Tensor:
        """Of x [b, l, h, p], dt [b, l, h], A, B [b, l, g, n], C, D, z, dt's bias: x's shape."""
        x, dt, decay, b, c, skip, gate, dt_bias = tensors
        cumulated, steps, states, products = _chunk_tensors(x, b, chunk)
        passed = torch.empty_like(states, dtype=c.dtype)
        del states
        out: Tensor = x.new_empty(x.shape)
        before_gate = x.new_empty(x.shape) if gate is not None else None
        launched(5)
        del steps, products, passed
        kept = out if before_gate is None else before_gate
        ctx.save_for_backward(kept, x, dt, cumulated, decay, b, c, skip, gate, dt_bias)
        ctx.chunk = chunk
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of all tensors; recomputes the states of each chunk."""
        _, x, dt, _, decay, b, c, skip, gate, dt_bias = ctx.saved_tensors
        d_b, d_c, d_dt = torch.empty_like(b), torch.empty_like(c), torch.empty_like(dt)
        dt_in = dt.new_empty(dt.shape)
        cumulated, steps, states, products = _chunk_tensors(x, b, ctx.chunk)
        states = torch.empty_like(states)
        d_gate = like(gate)
        d_states = torch.empty_like(states)
        passed = [torch.empty_like(states, dtype=x.dtype) for _ in range(2)]
        del states, d_states
        d_x, d_steps = x.new_empty(x.shape), torch.empty_like(steps)
        by_head = [x.new_empty(one.shape, dtype=torch.float32) for one in (b, c)]
        d_products, d_decays = torch.empty_like(products), torch.empty_like(steps)
        launched(20)
        del dt_in, cumulated, steps, products, passed, d_steps, by_head, d_products, d_decays
        d_decay, d_skip, d_bias = like(decay), like(skip), like(dt_bias)
        return None, d_x, d_dt, d_decay, d_b, d_c, d_skip, d_gate, d_bias


class _SplitConvScan(torch.autograd.Function):
    """``MambaSplitConv1dScanCombinedFn``: saves its input and, of its results, the output."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, chunk: int, shape: tuple[int, int, int, int], *parameters: Any
    ) -> Tensor:
        """``mixed`` [b, l, z + x + B + C + dt] gives [b, l, h * p]; shape is h, p, g, n."""
        conv, x, b = _convolved(mixed, shape)
        cumulated, steps, states, products = _chunk_tensors(x, b, chunk)
        passed = torch.empty_like(states, dtype=mixed.dtype)
        del states
        out, kept = (mixed.new_empty((*mixed.shape[:2], shape[0] * shape[1])) for _ in range(2))
        launched(7)
        del cumulated, steps, products, passed, conv
        ctx.save_for_backward(mixed, kept, *parameters)
        ctx.settings = chunk, shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the input and the parameters."""
        mixed, _kept, *parameters = ctx.saved_tensors
        chunk, shape = ctx.settings
        conv, x, b = _convolved(mixed, shape)
        d_mixed, d_conv = torch.empty_like(mixed), torch.empty_like(conv)
        cumulated, steps, states, products = _chunk_tensors(x, b, chunk)
        d_states = torch.empty_like(states)
        passed = [torch.empty_like(states, dtype=mixed.dtype) for _ in range(2)]
        d_products = torch.empty_like(products)
        launched(24)
        del d_conv, cumulated, steps, products, states, d_states, passed, d_products
        return d_mixed, None, None, *map(like, parameters)


class _GatedNorm(torch.autograd.Function):
    """``LayerNormFn`` of ``layernorm_gated.py``: saves input, gate and the groups' statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, groups: int) -> Tensor:
        """The input's shape."""
        rows = x.reshape(-1, x.shape[-1])
        gate_rows = None if gate is None else gate.reshape(-1, gate.shape[-1])
        launched(1)
        out = torch.empty_like(rows)
        statistics = rows.new_empty(rows.shape[0] * groups, dtype=torch.float32)
        ctx.save_for_backward(rows, weight, statistics, gate_rows)
        ctx.shape = x.shape
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of input, weight and gate."""
        rows, weight, _, gate = ctx.saved_tensors
        launched(2)
        d_input = torch.empty_like(rows).view(ctx.shape)
        d_gate = None if gate is None else torch.empty_like(gate).view(ctx.shape)
        return d_input, torch.empty_like(weight), d_gate, None


def mamba_chunk_scan_combined(  # noqa: PLR0917 - its own signature
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **_settings: Any,
) -> Tensor:
    """The function of that name, without final states, which only inference asks for."""
    return applied(_ChunkScan, chunk_size, x, dt, A, B, C, D, z, dt_bias)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    state_dtype: torch.dtype | None = None,
    **_settings: Any,
) -> Tensor:
    """The function of that name, without its own norm and projection."""
    heads = A.shape[0]
    width = headdim or D.shape[1]
    state = (conv1d_weight.shape[0] - heads * width) // (2 * ngroups)
    parameters = (conv1d_weight, conv1d_bias, dt_bias, A, D)
    return applied(_SplitConvScan, zxbcdt, chunk_size, (heads, width, ngroups, state), *parameters)


class RMSNorm(nn.Module):
    """The gated norm of ``layernorm_gated.py``."""

    def __init__(
        self,
        hidden_size: int,
        *,
        group_size: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **_settings: Any,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.groups = hidden_size // (group_size or hidden_size)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The input's shape."""
        return applied(_GatedNorm, x, self.weight, z, self.groups)


def _chunk_tensors(x: Tensor, b: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cumulative decays, steps, states and C*B of every chunk, all in float32."""
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    chunks = -(-length // chunk)

    def new(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    return (
        new(batch, heads, chunks, chunk),
        new(batch, heads, chunks, chunk),
        new(batch, chunks, heads, width, state),
        new(batch, chunks, groups, chunk, chunk),
    )


def _convolved(mixed: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The output of the convolution, and x and B in it."""
    heads, width, groups, state = shape
    batch, length = mixed.shape[:2]
    conv = mixed.new_empty((batch, length, heads * width + 2 * groups * state))
    x = conv[..., : heads * width].view(batch, length, heads, width)
    return conv, x, conv[..., : groups * state].view(batch, length, groups, state)
