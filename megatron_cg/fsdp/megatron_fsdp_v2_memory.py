"""Unsharded parameters of Megatron-FSDP v2 that keep their addresses.

Megatron-FSDP v2 gathers the parameters of a module into a buffer whose storage it grows before each
gather, and shrinks to nothing when the module is resharded. A graph needs the same addresses in
each step.

Note [Two buffers for many units]
    A module prefetches the next one: the gather of the next writes while this one computes, and it
    writes into the very buffer that the next will read. So neighbours in the order of prefetching
    need different buffers, and two are enough for any number of units with equal parameters. While
    graphs exist, such units alternate between two that are never freed. Graphs therefore add the
    parameters of two units of each shape. v2 itself holds two units at a time while it prefetches.
    A unit waits for the one that had the buffer before: resharding makes the stream of gathers wait
    for the stream that computes (megatron-fsdp 0.6.1, ``FsdpModule._reshard_parameter_groups``).
    Modules below different roots gather on different streams, so they share no buffer.

Note [A buffer in use]
    If a unit is gathered while another one still holds its buffer, it gets other memory. The guard
    of its graphs then sees that its parameters moved. All ranks see the same. With v2's own hooks
    this happens only if units run in another order than at capture. In a backward pass it is an
    error: autograd may have saved views of the unit's weights, and they do not move with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_cg.errors import BufferInUseError
from megatron_cg.fsdp.fsdp_symbols import fsdp_v2
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.patch import Undo, all_of, put_over

RELIES_ON = (
    *fsdp_v2("module:FsdpModule", "a sharded module", "_parameter_groups", "_context"),
    *fsdp_v2("module:FsdpModule", "whether it is gathered", "_unshard_event"),
    *fsdp_v2("module:FsdpModule._reshard_parameter_groups", "reshards a module"),
    *fsdp_v2(
        "module:FsdpContext",
        "what the modules below one root share",
        *("forward_order", "allgather_stream", "current_stream"),
    ),
    *fsdp_v2(
        "parameter_group:FsdpParameterGroup",
        "parameters that are gathered together",
        "unsharded_parameters",
        "_unsharded_model_weight",
    ),
    *fsdp_v2("dbuffer:DBuffer", "memory of a group", "local_buffer"),
    *fsdp_v2("dbuffer:DBuffer.get_local_tensor", "a parameter in that memory"),
    *fsdp_v2("dbuffer:DBuffer.reallocate_storage", "called before each gather"),
    *fsdp_v2("dbuffer:DBuffer.release_storage", "called when parameters are resharded"),
)


class _Buffer:
    """Memory for the unsharded parameters of one group at a time."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.storage = torch.empty_like(weights).untyped_storage()
        self.holder: Any = None


def stable_memory(layers: Iterable[Any]) -> Undo:
    """Give the unsharded parameters of some units buffers that stay.

    Args:
        layers: modules that v2 shards, after at least one forward pass. They are resharded.

    Returns:
        What lets v2 grow and shrink its storages again; to be called between two steps.
    """
    buffers: dict[Any, _Buffer] = {}

    def held() -> Iterator[Undo]:
        for layer in layers:
            _reshard(layer)
            yield partial(_reshard, layer)
            place = list(layer._context.forward_order).index(layer) % 2
            for number, group in enumerate(layer._parameter_groups):
                weights = group._unsharded_model_weight.local_buffer
                layout = (weights.numel(), weights.dtype, weights.device)
                owner = (id(layer._context), place, number, layout)
                if owner not in buffers:
                    buffers[owner] = _Buffer(weights)
                yield from _in_buffer(group, buffers[owner])

    return all_of(held())


def _reshard(layer: Any) -> None:
    """Reshard a module that is gathered: one that was prefetched, or whose pass was cut short.

    Its gather may still write when the buffer's memory is given back to the current stream.
    """
    if layer._unshard_event is not None:
        layer._reshard_parameter_groups()
        context = layer._context
        context.current_stream().wait_stream(context.allgather_stream)


def _in_buffer(group: Any, buffer: _Buffer) -> Iterator[Undo]:
    weights = group._unsharded_model_weight
    own = weights.local_buffer.untyped_storage()
    _point(group, buffer.storage)
    # Pointing at a storage that is too small makes it grow.
    yield weights.release_storage
    yield partial(_point, group, own)
    yield put_over(weights, "release_storage", partial(_release, group, buffer))
    yield put_over(weights, "reallocate_storage", partial(_take, group, buffer))


def _take(group: Any, buffer: _Buffer) -> None:
    """In place of ``DBuffer.reallocate_storage``; see Note [A buffer in use].

    Raises BufferInUseError.
    """
    weights = group._unsharded_model_weight.local_buffer
    is_there = weights.data_ptr() == buffer.storage.data_ptr()
    if buffer.holder in (None, group):
        buffer.holder = group
        if not is_there:
            _point(group, buffer.storage)
    elif is_there and in_backward_pass():
        raise BufferInUseError(
            "Megatron-FSDP v2 gathers a unit for its backward pass while another unit holds the "
            "buffer that both share while there are graphs. Run units in the order in which they "
            "ran at capture, and let v2 reshard each after its pass."
        )
    elif is_there:
        _point(group, _Buffer(weights).storage)


def _release(group: Any, buffer: _Buffer) -> None:
    """In place of ``DBuffer.release_storage``: another unit may have the buffer now."""
    if buffer.holder is group:
        buffer.holder = None


def _point(group: Any, storage: torch.UntypedStorage) -> None:
    """Make the group's unsharded parameters, as the same objects, lie in other memory."""
    weights = group._unsharded_model_weight
    old = weights.local_buffer
    weights.local_buffer = torch.empty(0, dtype=old.dtype, device=old.device).set_(
        storage, 0, old.size(), old.stride()
    )
    for index, parameter in enumerate(group.unsharded_parameters):
        parameter.data = weights.get_local_tensor(index)
