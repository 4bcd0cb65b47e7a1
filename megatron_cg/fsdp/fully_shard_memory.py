"""Unsharded parameters of FSDP2 that keep their addresses.

FSDP2 gathers a unit into memory that the allocator gives it, and frees that memory when it reshards
the unit. A graph needs the same addresses in each step.

Note [One buffer for many units]
    While graphs exist, units with equal parameters share one buffer that is never freed. This is
    safe because FSDP2 fills it late: a prefetch gathers into a collective's own memory, and
    ``wait_for_unshard`` copies from there on the stream that computes (torch 2.11,
    ``foreach_all_gather_copy_out``). By then the unit that had the buffer before has been
    resharded, and its kernels are earlier on the same stream. So the buffers take the memory of one
    unit of each kind. A unit has a buffer of its own if it stayed unsharded beside another one in
    the steps before capture.

Note [A buffer in use]
    A unit may be gathered while another one is still unsharded in the same buffer, since resharding
    was turned off after capture, or the user unsharded it ahead. If the other unit is idle, it is
    resharded: FSDP2 gathers it again before it is used. All ranks do so alike. If it is inside of a
    forward or backward pass, both would compute with the same memory, so this is an error. A unit
    never moves to other memory: autograd may have saved views of its weights. A forward pass that
    is not over when that of another unit begins has ended by an exception, since no unit is in
    another.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from megatron_cg.errors import BufferInUseError
from megatron_cg.upstream.patch import Undo, all_of, put_over
from megatron_cg.upstream.symbols import Symbol, changed

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
RELIES_ON = (
    Symbol("torch", f"{_GROUP}.wait_for_unshard", "what copies gathered parameters out"),
    Symbol("torch", f"{_GROUP}._to_sharded", "what frees them"),
    Symbol("torch", f"{_GROUP}.is_unsharded", "whether they are there"),
    Symbol("torch", f"{_PARAM}.free_unsharded_param", "what frees one of them"),
    Symbol("torch", f"{_PARAM}.init_all_gather_outputs", "what allocates one of them"),
)


def group_of(layer: Any) -> Any:
    """The ``FSDPParamGroup`` of a module that ``fully_shard`` was called on.

    Raises UpstreamChangedError if FSDP2 keeps it elsewhere.
    """
    state = layer._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    if group is None:
        raise changed(
            "torch", "FSDPState._fsdp_param_group", "the parameters of one fully_shard call"
        )
    return group


class _Buffer:
    """Memory for the unsharded parameters of one unit at a time."""

    def __init__(self, group: Any) -> None:
        self.holder = group
        self.storages = [
            [torch.empty_like(output).untyped_storage() for output in outputs]
            for outputs in _outputs(group)
        ]


def stable_memory(groups: Iterable[Any], apart: Container[Any] = ()) -> Undo:
    """Give the unsharded parameters of some units buffers that stay.

    Every unit must have been gathered at least once.

    Args:
        groups: the ``FSDPParamGroup`` of each unit. They are resharded.
        apart: those among them that get a buffer of their own.

    Returns:
        What lets FSDP2 allocate and free again; to be called between two steps.
    """
    buffers: dict[Any, _Buffer] = {}

    def held() -> Iterator[Undo]:
        for group in groups:
            group._to_sharded()
            layout = tuple(_layout(output) for outputs in _outputs(group) for output in outputs)
            owner = (layout, id(group) if group in apart else None)
            if owner not in buffers:
                buffers[owner] = _Buffer(group)
            yield from _in_buffer(group, buffers[owner])

    return all_of(held())


def _in_buffer(group: Any, buffer: _Buffer) -> Iterator[Undo]:
    for param, storages in zip(group.fsdp_params, buffer.storages, strict=True):
        _point(param, storages)
    yield partial(_release, group)
    for param in group.fsdp_params:
        yield put_over(param, "free_unsharded_param", _keep)
    wait = partial(_wait, group, buffer, group.wait_for_unshard)
    yield put_over(group, "wait_for_unshard", wait)


def _wait(group: Any, buffer: _Buffer, wait: Callable[[], None]) -> None:
    """Copy gathered parameters out; see Note [A buffer in use].

    Raises BufferInUseError.
    """
    if group._all_gather_result is not None:
        holder = buffer.holder
        if holder is not group and holder.is_unsharded:
            _require_idle(holder, group)
            holder._to_sharded()
        buffer.holder = group
    wait()


def _require_idle(holder: Any, group: Any) -> None:
    state = holder._training_state
    ended = state is TrainingState.FORWARD is group._training_state
    if ended or state in (TrainingState.IDLE, TrainingState.POST_BACKWARD):
        return
    raise BufferInUseError(
        f"FSDP2 gathers {group._module_fqn} while {holder._module_fqn} is inside of its "
        f"{'forward' if state is TrainingState.FORWARD else 'backward'} pass, and both share one "
        "buffer while there are graphs. In the steps before capture they were never unsharded at "
        "the same time. Run the model then as it runs later: with more warmup_steps, or with "
        "graph_units called after the change."
    )


def notice_unsharded(groups: Sequence[Any], notice: Callable[[Any], object]) -> Callable[[], None]:
    """Call ``notice`` with each group that is unsharded while another one becomes so.

    Args:
        groups: the ``FSDPParamGroup`` of each unit.
        notice: called with a group, perhaps several times.

    Returns the undo.
    """

    def gathered(group: Any, wait: Callable[[], None]) -> None:
        if group._all_gather_result is not None:
            for other in groups:
                if other is not group and other.is_unsharded:
                    notice(other)
        wait()

    return all_of(
        put_over(group, "wait_for_unshard", partial(gathered, group, group.wait_for_unshard))
        for group in groups
    )


def _keep() -> None:
    """Free nothing."""


def _outputs(group: Any) -> list[list[torch.Tensor]]:
    return [param.all_gather_outputs for param in group.fsdp_params]


def _layout(output: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return output.numel(), output.dtype, output.device


def _point(param: Any, storages: Sequence[torch.UntypedStorage]) -> None:
    """Make one parameter lie in other memory, as the same ``nn.Parameter``."""
    param.all_gather_outputs = [
        torch.empty(0, dtype=old.dtype, device=old.device).set_(
            storage, 0, old.size(), old.stride()
        )
        for old, storage in zip(param.all_gather_outputs, storages, strict=True)
    ]
    unsharded: nn.Parameter = param._unsharded_param
    unsharded.data = torch.as_strided(
        param.all_gather_outputs[0], unsharded.size(), unsharded.stride(), storage_offset=0
    )


def _release(group: Any) -> None:
    """Reshard and give each parameter memory of its own again, which is freed until the gather."""
    group._to_sharded()
    for param in group.fsdp_params:
        _point(param, [torch.empty_like(o).untyped_storage() for o in param.all_gather_outputs])
        param.free_unsharded_param()
