"""Weights are unsharded and resharded with a few calls per bucket, instead of a few per parameter.

Which buckets a call covers is known, and the next unit's are gathered later.

Note [Shown one parameter a bucket]
    Megatron-FSDP takes lists of parameters where it means their buckets. It gathers, waits for and
    releases each bucket once, and skips all further parameters of the bucket. So it gets only one
    parameter per bucket here, and every FP8 parameter, because it also manages the FP8 caches.
    What it does with a bucket does not change.

Note [Which buckets a list of parameters stands for]
    With the buckets of a list Megatron-FSDP also gathers some of the following ones. The set
    depends only on the model. Megatron-FSDP itself computes it, once for each list and set of
    options: its own method runs on a copy of its pipeline in which every bucket is ready, so it
    looks at each bucket and gathers none. Which of the buckets are missing is checked in each call.
    Usually none is missing.

Note [A group of one bucket]
    Megatron-FSDP coalesces the gathers of a bucket group. Most groups have one bucket, so there is
    nothing to coalesce. Such a bucket is gathered directly, by the same collective on the same
    stream. Megatron-FSDP's own method handles all other cases: several buckets, gathers across
    outer groups, a bucket that it keeps past a reset (``PRESERVED``).

Note [Launch first]
    Before a unit's forward pass Megatron-FSDP gathers its weights and those of the next unit. Only
    then does the unit run. Issuing a gather takes the host about as long as the gather takes the
    GPU. If the GPU waits for the host (in the first layers of a step; in all layers of a dropless
    MoE model), the GPU is idle in that time, and the gather is exposed. So the gather for the next
    unit is held until the graph of this unit is launched.
    The gather overwrites the buffer of the previous unit. So it must wait for that unit's kernels,
    but not for the graph that was just launched. It waits for an event that is recorded where
    Megatron-FSDP would have issued it.

Note [One order over all communicators]
    NCCL requires that all ranks issue the collectives of a process in one order, across all of its
    communicators (NCCL user guide, "Using multiple NCCL communicators concurrently"). After the
    launch and the gather the eager rest of the layer runs, with collectives such as the all-to-all
    of experts. A rank does not launch if a guard refuses the replay. So such a rank issues the
    gather before any part of the layer runs eagerly. The order on every rank is: (1) the gather of
    this unit's weights, (2) the collectives in its graph, replayed on all ranks or on none, (3) the
    gather for the next unit, (4) the collectives of the eager rest. If all ranks fall back to eager
    for a graph with collectives, (3) comes before (2) on all of them. Every eager pass of a graphed
    unit begins in ``megatron_cg/replay/guarded_graph.py``, which issues what is held. An error
    before a replay, and a verification, issue it too.
    A unit may reach neither a launch nor such an eager pass, because other code replaced its
    forward. Then the held gather is issued after the unit's forward pass, or before the next
    gather. That is later than in Megatron-FSDP.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from megatron_cg.events import in_range
from megatron_cg.fastpath.part import NotApplicableError, find_cell, float8_test, hook_functions
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import (
    Undo,
    replace_function,
    replace_function_in_cell,
    set_attribute,
    wrap_method,
)

Key = tuple[int, bool]
"""A bucket's number, and whether the key is for its transposed weights."""
_ASYNC, _OUTER = "async_param_gather", "outer_fsdp_group_param_gather"

REPLACES_GATHERS = fsdp_function(
    "AllGatherPipeline.all_gather_params",
    "what gathers the buckets of parameters",
    *("self", "params", "prefetch", "prefetch_order", _ASYNC, _OUTER),
    fingerprints=("65e4250c4171bbcb",),
)
_LISTED, _RELEASE = "_param_list_for_submodule_unshard", "release_module_parameters"
_HOOKS, _WALKS = "MegatronFSDP._register_fsdp_hooks.<locals>", "what walks over parameters"
REPLACES_UNSHARD = (
    *fsdp_function(f"{_HOOKS}.{_LISTED}", _WALKS, fingerprints=("58e78d8b964985ee",)),
    *fsdp_function(f"{_HOOKS}.{_RELEASE}", _WALKS, fingerprints=("52f2f0ae05776b96",)),
    *fsdp_function(
        "MegatronFSDP.all_gather_and_wait_parameters_ready",
        "what waits for parameters and marks them",
        fingerprints=("02036854c30821b7", "559f8f7f088f6ac3"),
    ),
    *fsdp_function(
        "DataParallelBuffer.fetch_bucket",
        "what points parameters at their bucket",
        fingerprints=("00cb9ee24111bcad",),
    ),
)
RELIES_ON = (
    *REPLACES_GATHERS,
    *REPLACES_UNSHARD,
    *fsdp_function(
        "AllGatherPipeline.async_bucket_gather",
        "what gathers one bucket",
        *("self", "bucket_id", "bwd"),
    ),
    *fsdp_class("AllGatherPipeline", "buffer", "bucket_status", "bucket_can_be_released"),
    *fsdp_class("AllGatherPipeline", "bucket_to_bucket_group", "ag_stream"),
    *fsdp_class("BucketStatus", "EMPTY", "PRESERVED", "READY_TO_USE"),
)


class DeferredPrefetch:
    """Holds gathers of a model until a graph is launched; nothing before :meth:`enable`."""

    def __init__(self) -> None:
        self._graphed: tuple[nn.Module, ...] = ()
        self._weights: frozenset[int] | None = None
        self._gather: Callable[[Any], None] | None = None
        self._since: Any = None

    def enable(self, graphed: Iterable[nn.Module]) -> Undo:
        """Hold gathers for the modules in ``graphed``, whose launches call :meth:`launched`."""
        return set_attribute(self, "_graphed", tuple(graphed))

    def begins_with_graph(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether a forward pass with ``weights`` begins with a graph.

        Call it in a pass only: between two steps modules may hold the optimizer's DTensors.
        """
        if self._weights is None:
            own = (p for module in self._graphed for p in module.parameters(recurse=False))
            self._weights = frozenset(map(id, own))
        return bool(weights) and id(weights[0]) in self._weights

    def hold(self, gather: Callable[[Any], None]) -> None:
        """Hold ``gather``. It is called once, with the event to wait for or with None."""
        if self._since is None:
            self._since = torch.cuda.Event()
        self._since.record()
        self._gather = gather

    def launched(self) -> None:
        """Issue what is held, after a graph was launched on the stream of the forward pass."""
        self.issue(self._since)

    def issue(self, since: Any = None) -> None:
        """Issue what is held, as Megatron-FSDP would at this point or at the event ``since``."""
        gather, self._gather = self._gather, None
        if gather is not None:
            gather(since)

    def drop(self) -> None:
        """Discard what is held: the pass that requested it has failed."""
        self._gather = None


def install_gathers(fsdp: Any, deferred: DeferredPrefetch) -> Callable[[], None]:
    """Replace what requests all-gathers of ``fsdp``'s weights; returns the undo.

    Raises NotApplicableError if weights are not sharded.
    """
    if fsdp.data_parallel_sharding_strategy == "no_shard":
        raise NotApplicableError("the sharding strategy is no_shard, in which nothing is gathered")
    pipeline = fsdp.all_gather_pipeline
    gathers = Gathers(pipeline, deferred, lambda: bool(fsdp.training))
    with ExitStack() as undo:
        undo.callback(deferred.drop)
        undo.callback(wrap_method(fsdp, "forward", before=deferred.drop))
        undo.callback(replace_function(pipeline, "all_gather_params", gathers.all_gather_params))
        return undo.pop_all().close


@dataclass(frozen=True)
class _Plan:
    """See Note [Which buckets a list of parameters stands for]."""

    listed: dict[Key, bool]
    """The list's own buckets, and their ``bucket_can_be_released`` in Megatron-FSDP: False."""
    looked_at: tuple[Key, ...]
    """``listed`` and the prefetched buckets, in Megatron-FSDP's order."""
    before_graph: bool
    """Whether the plan is for a forward pass that begins with a graph."""


class Gathers:
    """Replaces ``all_gather_params`` of an ``AllGatherPipeline``.

    ``replays`` says whether graphs are replayed in this pass.
    """

    def __init__(
        self, pipeline: Any, deferred: DeferredPrefetch, replays: Callable[[], bool]
    ) -> None:
        self._pipeline, self._deferred, self._replays = pipeline, deferred, replays
        self._all_gather_params = pipeline.all_gather_params
        module: Any = inspect.getmodule(type(pipeline))
        self._status = module.BucketStatus
        self._absent = (self._status.EMPTY, self._status.PRESERVED)
        self._forward = module.PrefetchOrder.FORWARD_PASS_ORDER
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def all_gather_params(
        self, params: Sequence[nn.Parameter], prefetch: bool = False, **options: Any
    ) -> None:
        self._deferred.issue()
        asked = (tuple(params), prefetch, *options.items())
        plan = self._plans.get(asked)
        if plan is None:
            plan = self._plans[asked] = self._plan(params, prefetch=prefetch, **options)
        self._pipeline.bucket_can_be_released.update(plan.listed)
        status = self._pipeline.bucket_status
        absent = [key for key in plan.looked_at if status[key] in self._absent]
        if not absent:
            return
        if self._can_gather(absent, options):
            if plan.before_graph and self._replays():
                later = [key for key in absent if key not in plan.listed]
                absent = [key for key in absent if key in plan.listed]
                if later:
                    self._deferred.hold(partial(self._gather, later))
            if absent:
                self._gather(absent)
        else:
            self._all_gather_params(params, prefetch=prefetch, **options)

    def _can_gather(self, absent: Sequence[Key], options: Mapping[str, Any]) -> bool:
        """Whether this class gathers these itself; see Note [A group of one bucket]."""
        status, group_of = self._pipeline.bucket_status, self._pipeline.bucket_to_bucket_group
        return (
            not options.get(_OUTER)
            and options.get(_ASYNC, True)
            and all(status[key] is self._status.EMPTY for key in absent)
            and len({group_of[bucket] for bucket, _ in absent}) == len(absent)
        )

    @in_range("gather weights")
    def _gather(self, buckets: Sequence[Key], since: Any = None) -> None:
        """Gather buckets, after the event ``since`` or after all work launched so far."""
        current = torch.cuda.current_stream()
        stream = self._pipeline.ag_stream or current
        if since is None:
            stream.wait_stream(current)
        else:
            stream.wait_event(since)
        with torch.cuda.stream(stream):
            for bucket, transposed in buckets:
                self._pipeline.async_bucket_gather(bucket, transposed)

    def _plan(self, params: Sequence[nn.Parameter], **options: Any) -> _Plan:
        asked = copy(self._pipeline)
        listed: dict[Key, bool] = {}
        looked_at: dict[Key, Any] = defaultdict(lambda: self._status.READY_TO_USE)
        asked.bucket_can_be_released, asked.bucket_status = listed, looked_at
        type(asked).all_gather_params(asked, params, **options)
        order = options.get("prefetch_order")
        before_graph = order is self._forward and self._deferred.begins_with_graph(params)
        return _Plan(listed, tuple(looked_at), before_graph)


class CachedParameters(list[nn.Parameter]):
    """Parameters as Megatron-FSDP lists them, and the subset that represents their buckets."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        bucket_of: Callable[[nn.Parameter], int],
        is_float8: Callable[[nn.Parameter], bool],
    ) -> None:
        super().__init__(parameters)
        seen: set[int] = set()
        self.shown: list[Any] = []
        """See Note [Shown one parameter a bucket]."""
        self.others: list[Any] = []
        self.marked = False
        """Whether ``others`` have Megatron-FSDP's marks of unsharded parameters."""
        for parameter in parameters:
            bucket = bucket_of(parameter)
            stands_for_all = bucket not in seen or is_float8(parameter)
            seen.add(bucket)
            (self.shown if stands_for_all else self.others).append(parameter)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield ``shown``; Megatron-FSDP calls this as it calls ``nn.Module.parameters``."""
        return iter(self.shown)


def install_unshard(
    fsdp: Any, after_backward: Callable[[nn.Module], None], deferred: DeferredPrefetch
) -> Callable[[], None]:
    """Replace the walks over parameters before and after a unit's passes; returns the undo.

    ``after_backward`` is called with a unit after its backward pass, before its buckets are freed.
    Gathers that ``deferred`` holds are issued at the latest when a unit is released.

    Raises NotApplicableError if weights are not sharded, and UpstreamChangedError if a symbol is
    gone; nothing is changed then.
    """
    if fsdp.data_parallel_sharding_strategy == "no_shard":
        raise NotApplicableError("the sharding strategy is no_shard, in which nothing is unsharded")
    store, is_float8 = fsdp.param_and_grad_buffer, float8_test(fsdp)
    functions = list(hook_functions(fsdp))
    listed, release = find_cell(functions, _LISTED), find_cell(functions, _RELEASE)
    # Megatron-FSDP's hooks run only in forward and backward passes, when modules hold their raw
    # parameters. So a list stays valid until the model is wrapped again.
    bucket_of, megatrons_list = store.param_to_param_group.__getitem__, listed.cell_contents

    @cache
    def list_of_unit(module: nn.Module, direction: str) -> CachedParameters:
        return CachedParameters(megatrons_list(module, direction), bucket_of, is_float8)

    @cache
    def all_of_unit(module: nn.Module) -> CachedParameters:
        return CachedParameters(list(module.parameters()), bucket_of, is_float8)

    with ExitStack() as undo:
        undo.callback(replace_function_in_cell(listed, list_of_unit))
        released = _released(release.cell_contents, all_of_unit, after_backward, deferred)
        undo.callback(replace_function_in_cell(release, released))
        gather = "all_gather_and_wait_parameters_ready"
        undo.callback(replace_function(fsdp, gather, _gathered(getattr(fsdp, gather))))
        for group in store.parameter_groups:
            buffer = group.model_weight_buffer
            if buffer is not None and not any(map(is_float8, group.params)):
                undo.callback(replace_function(buffer, "fetch_bucket", _fetched(buffer)))
        return undo.pop_all().close


def _gathered(original: Callable[..., None]) -> Callable[..., None]:
    def all_gather_and_wait_parameters_ready(
        params: Sequence[nn.Parameter], *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(params, CachedParameters):
            original(params, *args, **kwargs)
            return
        original(params.shown, *args, **kwargs)
        if not params.marked:
            # These marks stay, except the first; every backward pass begins by clearing it.
            params.marked = True
            for parameter in params.others:
                parameter.grad_added_to_main_grad = False
                parameter.__fsdp_param__ = True
                parameter.overwrite_main_grad = params.shown[0].overwrite_main_grad

    return all_gather_and_wait_parameters_ready


def _released(
    original: Callable[..., None],
    all_of_unit: Callable[[nn.Module], CachedParameters],
    after_backward: Callable[..., None],
    deferred: DeferredPrefetch,
) -> Callable[..., None]:
    def release_module_parameters(
        module: nn.Module, bwd: bool, lazy: bool = False, *unused: Any
    ) -> None:
        if bwd:
            after_backward(module)
        else:
            # For a unit that launched no graph; before any bucket of it is freed or kept.
            deferred.issue()
        original(all_of_unit(module), bwd, lazy)

    return release_module_parameters


def _fetched(buffer: Any) -> Callable[..., Any]:
    """A ``fetch_bucket`` that sets the parameters' data only if they do not point there yet."""
    original = buffer.fetch_bucket
    addresses: list[int] = []

    def fetch_bucket(
        dtype: Any = None, set_param_data: bool = False, strict_assignments: bool = True
    ) -> Any:
        bucket = original(dtype, False, strict_assignments)
        if not set_param_data:
            return bucket
        if (
            not addresses
            or bucket.data.data_ptr() != addresses[0]
            or addresses[1:] != [parameter.data_ptr() for parameter in buffer.params]
        ):
            bucket = original(dtype, True, strict_assignments)
            addresses[:] = [bucket.data.data_ptr()]
            addresses.extend(parameter.data_ptr() for parameter in buffer.params)
        return bucket

    return fetch_bucket
