"""Dense tensors: what an address, a shape, strides and a dtype tell all about."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` lie in one block of memory, by its strides."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
