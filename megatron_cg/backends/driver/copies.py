"""Copies into the static memory of a graph: only what is not there already, in one call a dtype.

``torch._foreach_copy_`` copies a list of tensors by one kernel if they have one dtype and one
device, and one by one otherwise (torch 2.11, ``ForeachUtils.h``, ``can_use_fast_route``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_cg.replay.replay_function import StaticMemory


def copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each value into its static tensor, unless it is there.

    A value may lie in the static memory of another one: a module that returns its inputs returns
    static memory, which a caller may pass on in another order. One kernel copies all at once, so
    such a value is read before.

    Args:
        pairs: a static tensor, and a value of the same shape.
    """
    pairs = list(pairs)
    written = {static.untyped_storage().data_ptr() for static, _ in pairs}
    groups: dict[
        tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    for static, value in pairs:
        if not StaticMemory.of(static).holds(value):
            into, values = groups.setdefault((static.dtype, static.device), ([], []))
            into.append(static)
            # Neither can another layout of the same memory be copied onto itself.
            is_static = value.untyped_storage().data_ptr() in written
            values.append(value.clone() if is_static else value)
    for into, values in groups.values():
        torch._foreach_copy_(into, values)
