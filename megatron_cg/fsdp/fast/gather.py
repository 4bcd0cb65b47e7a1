"""All-gathers of weights, asked for without working out each time which buckets they are.

Note [Which buckets a list of parameters stands for]
    With the buckets of a list Megatron-FSDP gathers some that follow. Which they are depends on the
    model alone, and is asked of Megatron-FSDP itself, once for each list and way of asking: of a
    copy of its pipeline in which every bucket is ready, so that it looks at each and gathers none.
    Which of them have to be gathered depends on the moment, and is looked up each time. Mostly
    there are none; else Megatron-FSDP is asked for those, without any that follow.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1: ``AllGatherPipeline`` with the methods and
attributes named below, and ``BucketStatus``. A bucket that it keeps past a reset, ``PRESERVED``, is
left to it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.fsdp.symbols import in_both
from megatron_cg.undo import set_attribute

Key = tuple[int, bool]
"""A bucket's number, and whether its transposed weights are meant."""

RELIES_ON = (
    *in_both(
        "param_and_grad_buffer:AllGatherPipeline",
        "what gathers weights",
        attributes=(
            "buffer",
            "bucket_status",
            "bucket_can_be_released",
            "param_gather_event_map",
            "get_bucket_key",
            "get_fsdp_buffer",
            "recycle_unused_buckets",
        ),
    ),
    *in_both(
        "param_and_grad_buffer:AllGatherPipeline.all_gather_params",
        "what gathers the buckets of parameters",
        parameters=("self", "params", "prefetch"),
    ),
    *in_both(
        "param_and_grad_buffer:AllGatherPipeline.async_bucket_gather",
        "what gathers one bucket",
        parameters=("self", "bucket_id", "bwd"),
    ),
    *in_both(
        "param_and_grad_buffer:BucketStatus",
        "how far a bucket is",
        attributes=("EMPTY", "PRESERVED", "COMMUNICATING", "READY_TO_USE"),
    ),
)


def install_gathers(fsdp: Any) -> Callable[[], None]:
    """Replace what asks for all-gathers of ``fsdp``'s weights; returns the undo."""
    pipeline = fsdp.all_gather_pipeline
    gathers = Gathers(pipeline)
    with ExitStack() as undo:
        for name in ("all_gather_params", "async_bucket_gather"):
            undo.callback(set_attribute(pipeline, name, getattr(gathers, name)))
        return undo.pop_all().close


@dataclass(frozen=True)
class _Plan:
    """See Note [Which buckets a list of parameters stands for]."""

    listed: dict[Key, bool]
    """Those of the list itself, with what Megatron-FSDP notes of each: it may not be released."""
    looked_at: tuple[Key, ...]
    """These and those that follow, in Megatron-FSDP's order."""


class Gathers:
    """What asks an ``AllGatherPipeline`` for buckets, in the place of its own methods."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._all_gather_params = pipeline.all_gather_params
        self._async_bucket_gather = pipeline.async_bucket_gather
        module: Any = inspect.getmodule(type(pipeline))
        self._status = module.BucketStatus
        self._absent = (self._status.EMPTY, self._status.PRESERVED)
        self._stands_for = {
            bucket: parameter for parameter, bucket in pipeline.buffer.param_to_param_group.items()
        }
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def all_gather_params(
        self, params: Sequence[nn.Parameter], prefetch: bool = False, **options: Any
    ) -> None:
        """Gather the buckets of ``params`` that are not there, as the pipeline's own would."""
        asked = (tuple(params), prefetch, *options.items())
        plan = self._plans.get(asked)
        if plan is None:
            plan = self._plans[asked] = self._plan(params, prefetch=prefetch, **options)
        self._pipeline.bucket_can_be_released.update(plan.listed)
        status = self._pipeline.bucket_status
        absent = [key for key in plan.looked_at if status[key] in self._absent]
        if not absent:
            return
        if any(status[key] is self._status.PRESERVED for key in absent):
            self._all_gather_params(params, prefetch=prefetch, **options)
        else:
            self._all_gather_params([self._stands_for[bucket] for bucket, _ in absent], **options)

    def async_bucket_gather(self, bucket_id: int, bwd: bool) -> None:
        """Gather one bucket; Megatron-FSDP makes a function for each that says it is there."""
        pipeline = self._pipeline
        key = pipeline.get_bucket_key(bucket_id, bwd)
        status = pipeline.bucket_status
        if status[key] is not self._status.EMPTY:
            self._async_bucket_gather(bucket_id, bwd)
            return
        pipeline.bucket_can_be_released[key] = False
        status[key] = self._status.COMMUNICATING
        weights = pipeline.get_fsdp_buffer(bucket_id, bwd)
        pipeline.recycle_unused_buckets()
        with torch.no_grad():
            work = dist.all_gather_into_tensor(
                output_tensor=weights.fetch_bucket(set_param_data=True).data,
                input_tensor=weights.get_shard_from_local_buffer(),
                group=weights.data_parallel_group,
                async_op=True,
            )
        is_there = partial(status.__setitem__, key, self._status.READY_TO_USE)
        pipeline.param_gather_event_map[key] = (work, is_there)

    def _plan(self, params: Sequence[nn.Parameter], **options: Any) -> _Plan:
        asked = copy(self._pipeline)
        listed: dict[Key, bool] = {}
        looked_at: dict[Key, Any] = defaultdict(lambda: self._status.READY_TO_USE)
        asked.bucket_can_be_released, asked.bucket_status = listed, looked_at
        type(asked).all_gather_params(asked, params, **options)
        return _Plan(listed, tuple(looked_at))
