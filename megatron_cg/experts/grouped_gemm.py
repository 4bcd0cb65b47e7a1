"""A grouped GEMM that takes its row counts from the device.

One kernel for all experts, whose counts may be the result of a kernel. So a graph can hold it: a
replay uses the counts of that replay.

Note [Rows without an expert]
    ``rows`` may have more rows than all counts add up to. ``grouped_mm`` neither reads them nor
    writes their results: these stay uninitialized and may be NaN. Nothing of them reaches a
    result. The operations between two grouped GEMMs work row by row; weight gradients sum over
    the counted rows; and the exchange of tokens sends the counted rows.

Note [Transformer Engine's contract]
    ``GroupedLinear.forward`` of Transformer Engine looks up ``_GroupedLinear`` in its module for
    each call. :class:`GroupedGemm` has the same arguments and results, so that the module, its
    parameters and Megatron's classes above it stay as they are.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import grouped_mm

from megatron_cg.errors import ConfigurationError, Violation, say
from megatron_cg.experts.rules import HOPPER

_ALIGNMENT = 16
"""Bytes, of each row and address that ``grouped_mm`` reads or writes."""
_BIAS, _FP8, _CALIBRATION, _DELAYED, _DEBUG, _ONE_WEIGHT = 0, 2, 3, 4, 20, 21
"""Places in ``non_tensor_args``. ``install.py`` checks the code of Transformer Engine that fills
them."""


def on_device(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    if counts.device == device:
        return counts
    if bool((counts == counts[0]).all()):
        # As with drop and pad, where a graph may hold this: it cannot hold a copy from the host.
        return torch.full_like(counts, int(counts[0]), device=device)
    # From pinned memory the copy does not wait for the device.
    return counts.pin_memory().to(device, non_blocking=True)


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[experts, out, in]`` of weights ``[out, in]`` each, all of one shape and dtype.

    The result is a view if the weights lie in one storage at equal distances and aligned, as in a
    bucket of Megatron-FSDP. Otherwise it is a copy.
    """
    first = weights[0]
    distance = _distance(weights)
    if distance is not None:
        return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))
    return torch.stack(tuple(weights))


def _distance(weights: Sequence[torch.Tensor]) -> int | None:
    """Elements from one weight to the next in their storage; None if that differs."""
    first = weights[0]
    layouts = {(weight.untyped_storage()._cdata, weight.stride()) for weight in weights}
    if len(layouts) > 1 or first.storage_offset() * first.itemsize % _ALIGNMENT:
        return None
    distances = {b.storage_offset() - a.storage_offset() for a, b in pairwise(weights)}
    distance = int(distances.pop()) if distances else first.numel()
    if distances or distance < first.numel() or distance * first.itemsize % _ALIGNMENT:
        return None
    return distance


def refuse_other(settings: Any, weight: torch.Tensor) -> None:
    """Raise ConfigurationError for a grouped GEMM of Transformer Engine that this one is not.

    ``settings`` are its ``non_tensor_args``, ``weight`` is the first one, ``[out, in]``.
    """
    remedy = say("{type:--cg-grouped-gemm te} (FP8: or cublas)")
    others = _others(settings, weight)
    broken = [Violation("grouped-gemm", found, why, remedy) for found, why in others]
    if broken:
        raise ConfigurationError(broken)


def _others(settings: Any, weight: torch.Tensor) -> Iterator[tuple[str, str]]:
    store = settings[_DELAYED]
    for found, name in (
        (settings[_BIAS], "a bias"),
        (settings[_FP8] or settings[_CALIBRATION], "FP8"),
        (store is not None and store.delay_wgrad_compute(), "delayed weight gradients"),
        (settings[_DEBUG], "Transformer Engine's debug tools"),
        (settings[_ONE_WEIGHT], "one parameter for all experts"),
    ):
        if found:
            yield name, "torch's grouped GEMM computes unquantized weights, without biases, at once"
    if any(size * weight.itemsize % _ALIGNMENT for size in weight.shape):
        least = _ALIGNMENT // weight.itemsize
        yield (
            f"weights of {tuple(weight.shape)}",
            f"torch's grouped GEMM takes sizes that are multiples of {least}",
        )
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] != HOPPER:
        yield (
            f"the GPU {torch.cuda.get_device_name(weight.device)}",
            "torch's grouped GEMM is known to be right on Hopper alone: on Blackwell, weight "
            "gradients of experts without tokens are wrong (pytorch/pytorch#172439), and older "
            "GPUs read the counts on the CPU",
        )


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """With usual strides, which ``contiguous`` does not give to a single row or none."""
    if rows.shape[0] > 1:
        return rows.contiguous()
    return rows.clone(memory_format=torch.contiguous_format)


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
        refuse_other(non_tensor_args, weights[0])
        rows = _dense(inp.reshape(-1, inp.shape[-1]))
        ends = on_device(m_splits, rows.device).cumsum(0).to(torch.int32)
        result = grouped_mm(rows, stacked(weights).transpose(1, 2), offs=ends)
        if ctx is not None:
            ctx.save_for_backward(rows, ends, *weights)
            ctx.shape = inp.shape
            ctx.needed = inp.requires_grad, any(weight.requires_grad for weight in weights)
            ctx.unused = len(weights_and_biases) - experts
        return result.view(*inp.shape[:-1], result.shape[-1]), [None] * experts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the rows and, as views of one tensor, of the weights."""
        rows, ends, *weights = ctx.saved_tensors
        gradient = _dense(gradients[0].reshape(-1, gradients[0].shape[-1]))
        of_rows, of_weights = ctx.needed
        d_rows = grouped_mm(gradient, stacked(weights), offs=ends) if of_rows else None
        d_weights: Any = [None] * len(weights)
        if of_weights:
            d_weights = grouped_mm(gradient.t(), rows, offs=ends).unbind(0)
        d_input = d_rows.view(ctx.shape) if d_rows is not None else None
        return (d_input, None, None, None, None, *d_weights, *[None] * ctx.unused)
