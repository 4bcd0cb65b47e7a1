"""Copies into the static memory of a graph: only what is not there already, in one call a dtype.

``torch._foreach_copy_`` copies a list of tensors by one kernel if they have one dtype and one
device, and one by one otherwise (torch 2.11, ``ForeachUtils.h``, ``can_use_fast_route``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_cg.replay.static_memory import StaticMemory


def copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each value into its static tensor, unless it is there.

    Args:
        pairs: a static tensor, and a value of the same shape.
    """
    groups: dict[
        tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    for static, value in pairs:
        if not StaticMemory.of(static).holds(value):
            into, values = groups.setdefault((static.dtype, static.device), ([], []))
            into.append(static)
            # Another layout of the same memory cannot be copied onto itself.
            values.append(value.clone() if value.data_ptr() == static.data_ptr() else value)
    for into, values in groups.values():
        torch._foreach_copy_(into, values)
