"""``reshard_after_forward=False`` for the last unit.

A backward pass begins with the unit that ended the forward pass. In between Megatron-FSDP frees
the unit's weights and gathers them again. That gather must wait: the reduction of the output
layer's gradients runs before it on the same communicator. So the GPU only communicates until both
are done (0.8 ms a microbatch of the preset ``llama`` on two H200s). With double buffers the memory
stays allocated in either case, so the weights are kept in it. FSDP2 does the same
(``fully_shard`` of torch, ``reshard_after_forward`` of a root's last unit).

Note [Learned from the pass before]
    A unit is kept if its forward pass was the last one before the previous backward pass, and that
    backward pass began with it. When the last unit changes, for example when pipeline stages start
    up, one pass runs as in Megatron-FSDP, and the next one keeps the right unit again. If no
    backward pass follows, the weights are freed when the next forward pass gathers its first unit,
    so weights that have changed are gathered again. This needs a second unit. Weights that change
    between a forward pass and its own backward pass are not gathered again; no gradient is correct
    then.

Note [On all ranks, or on none]
    A pass has one gather less. If one rank alone skipped it, its collectives would pair with the
    wrong collectives of the other ranks. Both have the same size, so no error would be raised. So
    if a rank falls back to eager by itself, this part stays installed until all ranks have agreed
    to continue without graphs (``Agreement.together``), or capture again, where hooks run in
    another order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch

from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.fastpath.params.shared_buffers import free_before_others
from megatron_cg.fsdp.fsdp_symbols import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import put_over, set_attribute

_RELEASE, _RECYCLE = "release_bucket", "recycle_unused_buckets"
_NAME = "_megatron_cg_last_unit"
REPLACES = (
    *fsdp_function(
        f"AllGatherPipeline.{_RELEASE}",
        "what frees a bucket of weights",
        *("self", "bucket_id", "bwd", "lazy"),
        fingerprint="222977e833880906",
    ),
    *fsdp_function(
        f"AllGatherPipeline.{_RECYCLE}",
        "what frees buckets before a gather",
        fingerprint="415ebdf448a75f2d",
    ),
)
"""Functions that are not called for the last unit."""
RELIES_ON = (
    *REPLACES,
    *fsdp_class("AllGatherPipeline", "bucket_can_be_released"),
    *fsdp_class("ParamAndGradBuffer", "double_buf_units", "parameter_groups"),
    *fsdp_class("ParameterGroup", "fsdp_unit_id", "transpose_weight_buffer"),
    *fsdp_class("MegatronFSDP", "_root_pre_backward_hook_issued"),
)


def install_last_unit(fsdp: Any) -> Callable[[], None]:
    """Keep the last unit's weights between its forward and backward pass; returns the undo.

    The undo may run between any two steps, on all ranks between the same two.

    Raises:
        NotApplicableError: weights are not freed, keeping them would take more memory, there is one
            unit only, or backward passes gather other weights.
    """
    strategy = fsdp.data_parallel_sharding_strategy
    if strategy != "optim_grads_params":
        raise NotApplicableError(f"the sharding strategy is {strategy}, which frees no weights")
    store = fsdp.param_and_grad_buffer
    if not store.double_buf_units:
        raise NotApplicableError(
            "without double buffers the last unit would take memory of its own"
        )
    if len({group.fsdp_unit_id for group in store.parameter_groups} - {None}) < 2:
        raise NotApplicableError("there is one unit only, and none whose gather shows a new pass")
    if any(group.transpose_weight_buffer is not None for group in store.parameter_groups):
        raise NotApplicableError("transposed weights are gathered for backward passes")
    last_unit = _LastUnit(fsdp)
    pipeline = fsdp.all_gather_pipeline
    with ExitStack() as undo:
        undo.callback(set_attribute(pipeline, _NAME, last_unit))
        undo.callback(put_over(pipeline, _RELEASE, last_unit.release_bucket))
        undo.callback(put_over(pipeline, _RECYCLE, last_unit.recycle_unused_buckets))
        undo.callback(free_before_others(store, last_unit))
        undo.callback(last_unit.free)
        last_unit.undo = undo.pop_all().close
    return last_unit.undo


def reshard_last_unit(fsdp: Any) -> None:
    """Undo :func:`install_last_unit` before a capture, on all ranks, whoever holds its undo."""
    last_unit = vars(fsdp.all_gather_pipeline).get(_NAME)
    if isinstance(last_unit, _LastUnit):
        last_unit.undo()


class _LastUnit:
    """Replaces the methods with which an ``AllGatherPipeline`` frees buckets."""

    def __init__(self, fsdp: Any) -> None:
        self.undo: Callable[[], None] = lambda: None
        self._fsdp, self._pipeline = fsdp, fsdp.all_gather_pipeline
        self._release: Callable[..., None] = getattr(self._pipeline, _RELEASE)
        self._recycle: Callable[[], None] = getattr(self._pipeline, _RECYCLE)
        store = fsdp.param_and_grad_buffer
        self._unit_of = [group.fsdp_unit_id for group in store.parameter_groups]
        self._units = frozenset(store.double_buf_units)
        self._ended: int | None = None
        """The unit whose forward pass ended last, until a backward pass has processed a unit."""
        self._last: int | None = None
        """See Note [Learned from the pass before]."""
        self._held: set[int] = set()
        """Buckets that were not freed."""
        self._recycling = False

    def release_bucket(self, bucket_id: int, bwd: bool, lazy: bool = False) -> None:
        """Free a bucket, unless it is kept for the backward pass that follows."""
        unit = self._unit_of[bucket_id]
        if not self._recycling and not lazy and unit is not None:
            if self._fsdp._root_pre_backward_hook_issued:
                self._backward_ended(unit)
            elif self._is_kept_after_forward(unit):
                self._held.add(bucket_id)
                return
        self._held.discard(bucket_id)
        self._release(bucket_id, bwd, lazy)

    def recycle_unused_buckets(self) -> None:
        """Free what may be freed before a gather, and kept buckets that no backward pass used."""
        if self._held and not self._fsdp._root_pre_backward_hook_issued:
            self.free()
        self._recycling = True
        try:
            self._recycle()
        finally:
            self._recycling = False

    def kept(self) -> Collection[int]:
        """See :class:`.Gathered`."""
        return self._held

    def give_way(self) -> None:
        """See :class:`.Gathered`."""
        self.free()

    def free(self) -> None:
        """Free the kept buckets."""
        while self._held:
            self._release(self._held.pop(), False)

    def _backward_ended(self, unit: int) -> None:
        if self._ended is not None:
            self._last = unit if unit == self._ended else None
            self._ended = None

    def _is_kept_after_forward(self, unit: int) -> bool:
        if not (self._fsdp.training and torch.is_grad_enabled()):
            return False
        self._ended = unit
        return unit == self._last and unit in self._units
