"""Double buffers that all models of a process share.

Megatron-FSDP names a double buffer after its kind and its number, and looks it up by its name in
one table for the process. So each model gathers its units into the same two buffers. It frees
all units of a model by the end of its forward pass. Here some stay gathered for longer. If another
model, such as a teacher, runs in that time, its weights would overwrite them. So these units are
freed before another model takes a buffer, and gathered again when they are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Protocol
from weakref import ref

from megatron_cg.fsdp.fsdp_symbols import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import put_over

_TABLE, _TAKE = "get_global_memory_buffer", "get_tensor"
RELIES_ON = (
    *fsdp_function(_TABLE, "the buffers of a process"),
    *fsdp_class("FixedPoolAllocator", "using_buffer", "_get_gbuf_name"),
    *fsdp_class("ParamAndGradBuffer", "weight_alloc"),
)


class Gathered(Protocol):
    """Keeps buckets of weights gathered that Megatron-FSDP would have freed by now."""

    def kept(self) -> Collection[int]:
        """These buckets. The model itself gathers none of them."""

    def give_way(self) -> None:
        """Free them."""


def free_before_others(store: Any, gathered: Gathered) -> Callable[[], None]:
    """Let ``gathered`` free its buckets before another model takes a double buffer of one.

    Args:
        store: the model's ``ParamAndGradBuffer``, with double buffers.
        gathered: what keeps some buckets gathered. The table refers to it weakly, so that a model
            that nobody uses is freed.

    Returns the undo.
    """
    module: Any = inspect.getmodule(type(store))
    table = getattr(module, _TABLE)()
    take, pool, keeps = getattr(table, _TAKE), ref(store.weight_alloc), ref(gathered)

    def get_tensor(shape: Any, dtype: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        model, buffers = keeps(), pool()
        if model is not None and buffers is not None:
            for bucket in model.kept():
                place = buffers.using_buffer.get(bucket)
                if place is not None and buffers._get_gbuf_name(*place) == name:
                    model.give_way()
                    break
        return take(shape, dtype, name, *args, **kwargs)

    return put_over(table, _TAKE, get_tensor)
