"""Weights are unsharded and resharded with a few calls per bucket, instead of a few per parameter.

Note [Shown one parameter a bucket]
    Megatron-FSDP takes lists of parameters where it means their buckets, and skips all further
    parameters of a bucket. So it gets only one parameter per bucket here, and every FP8 parameter,
    because it also manages the FP8 caches. What it does with a bucket does not change.

Note [Launch first]
    Before a unit's forward pass Megatron-FSDP gathers its weights and those of the next unit. Only
    then does the unit run. Issuing a gather takes the host about as long as the gather takes the
    GPU. If the GPU waits for the host (in the first layers of a step; in all layers of a dropless
    MoE model), the gather is exposed. So the gather for the next unit is held until the graph of
    this unit is launched.
    The later gather overwrites the buffer of the previous unit. So it must wait for that unit's
    kernels, but not for the graph that was just launched: not for the current stream, as in
    Megatron-FSDP, but for an event that was recorded where Megatron-FSDP would have issued it.

Note [A group of one bucket]
    Megatron-FSDP's method, asked again for what was held, takes as long in Python as NCCL needs to
    launch. It coalesces the gathers of a bucket group, of which most have one bucket. Such buckets
    are gathered directly, by the same collective on the same stream. Which buckets a list stands
    for depends only on the model: the method itself runs once for each list on a copy of the
    pipeline in which every bucket is ready, so that it looks at each bucket and gathers none.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath.part import NotApplicableError, find_cell, float8_test
from megatron_cg.fsdp.roles import HOOKS_SCOPE, fsdp_class, fsdp_function
from megatron_cg.upstream import patch

_ASYNC, _OUTER = "async_param_gather", "outer_fsdp_group_param_gather"
_GATHER, _ABSENT = "all_gather_params", ("EMPTY", "PRESERVED")
Key = tuple[int, bool]
"""A bucket's number, and whether the key is for its transposed weights."""
REPLACES_GATHERS = fsdp_function(
    f"AllGatherPipeline.{_GATHER}",
    "what gathers the buckets of parameters",
    "65e4250c4171bbcb",
    parameters=("self", "params", "prefetch", "prefetch_order", _ASYNC, _OUTER),
)
_LISTED, RELEASE = "_param_list_for_submodule_unshard", "release_module_parameters"
_WAIT, _FETCH = "all_gather_and_wait_parameters_ready", "fetch_bucket"
_WALKS = "what walks over parameters"
REPLACES_RELEASE = fsdp_function(HOOKS_SCOPE + RELEASE, _WALKS, "52f2f0ae05776b96")
REPLACES_UNSHARD = (
    *fsdp_function(HOOKS_SCOPE + _LISTED, _WALKS, "58e78d8b964985ee"),
    *REPLACES_RELEASE,
    *fsdp_function(
        f"MegatronFSDP.{_WAIT}", "what waits for parameters", "02036854c30821b7", "559f8f7f088f6ac3"
    ),
    *fsdp_function(f"DataParallelBuffer.{_FETCH}", "what fetches a bucket", "00cb9ee24111bcad"),
)
RELIES_ON = (
    *(*REPLACES_GATHERS, *REPLACES_UNSHARD),
    *fsdp_function(
        "AllGatherPipeline.async_bucket_gather",
        "what gathers one bucket",
        parameters=("self", "bucket_id", "bwd"),
    ),
    *fsdp_class("AllGatherPipeline", "bucket_status", "bucket_can_be_released"),
    *fsdp_class("AllGatherPipeline", "bucket_to_bucket_group", "ag_stream"),
    *fsdp_class("BucketStatus", *_ABSENT, "READY_TO_USE"),
)


class DeferredPrefetch:
    """Holds prefetches of a model until a graph is launched; nothing before :meth:`install`."""

    def __init__(self) -> None:
        self._held: Callable[[], None] | None = None
        self._buckets: tuple[Key, ...] = ()
        """What the held gather looks at."""
        self._pipeline: Any = None
        self._since: Any = None
        """Where Megatron-FSDP would have issued what is held."""
        self._beside: Any = None
        """A stream that waits for no more than that."""

    @patch.combined_undo
    def install(self, fsdp: Any, graphed: Collection[nn.Module]) -> Iterator[patch.Undo]:
        """Hold what ``fsdp`` prefetches before the forward pass of a unit that begins with a graph.

        ``graphed`` are the modules inside graphs, whose launches call :meth:`launched`.
        """
        self._pipeline = pipeline = fsdp.all_gather_pipeline
        self._since, self._beside = torch.cuda.Event(), torch.cuda.Stream()
        upstream: Any = inspect.getmodule(type(pipeline))
        forward, gather = upstream.PrefetchOrder.FORWARD_PASS_ORDER, getattr(pipeline, _GATHER)
        ready, known = upstream.BucketStatus.READY_TO_USE, dict[Any, tuple[Key, ...]]()

        @cache
        def weights() -> frozenset[int]:
            # Called in a pass only: between two steps modules may hold the optimizer's DTensors.
            own = (p for module in graphed for p in module.parameters(recurse=False))
            return frozenset(map(id, own))

        def buckets_of(params: Sequence[nn.Parameter], options: dict[str, Any]) -> tuple[Key, ...]:
            """See Note [A group of one bucket]."""
            asked = copy(pipeline)
            statuses = asked.bucket_status = defaultdict(lambda: ready)
            asked.bucket_can_be_released = {}
            getattr(type(asked), _GATHER)(asked, params, prefetch=True, **options)
            return tuple(statuses)

        def all_gather_params(
            params: Sequence[nn.Parameter], prefetch: bool = False, **options: Any
        ) -> None:
            self.issue()
            is_forward = options.get("prefetch_order") is forward and fsdp.training
            is_usual = options.get(_ASYNC, True) and not options.get(_OUTER)
            holds = prefetch and params and is_forward and is_usual and id(params[0]) in weights()
            gather(params, prefetch=prefetch and not holds, **options)
            if holds:
                self._since.record()
                self._held = partial(gather, params, prefetch=True, **options)
                key = (*map(id, params), *options.items())
                if key not in known:
                    known[key] = buckets_of(params, options)
                self._buckets = known[key]

        yield self.drop
        yield patch.wrap_method(fsdp, "forward", before=self.drop)
        yield patch.replace_function(pipeline, _GATHER, all_gather_params)

    def launched(self) -> None:
        """Issue what is held, after a graph was launched on the stream of the forward pass."""
        if self._held is None:
            return
        status, group_of = self._pipeline.bucket_status, self._pipeline.bucket_to_bucket_group
        missing = [key for key in self._buckets if status[key].name in _ABSENT]
        stream = self._pipeline.ag_stream
        if stream is None or len({group_of[bucket] for bucket, _ in missing}) < len(missing):
            self._beside.wait_event(self._since)
            with self._beside:
                self.issue()
            return
        self._held = None
        stream.wait_event(self._since)
        with stream:
            for bucket, is_transposed in missing:
                self._pipeline.async_bucket_gather(bucket, is_transposed)

    def issue(self) -> None:
        """Issue what is held, as Megatron-FSDP would at this point."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def drop(self) -> None:
        """Discard what is held: the pass that requested it has failed."""
        self._held = None


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


@patch.combined_undo
def install_unshard(fsdp: Any, deferred: DeferredPrefetch) -> Iterator[patch.Undo]:
    """Replace the walks over parameters before and after a unit's passes.

    Gathers that ``deferred`` holds are issued at the latest when a unit is released.

    Raises NotApplicableError if weights are not sharded, and UpstreamChangedError if a symbol is
    gone; nothing is changed then.
    """
    if fsdp.data_parallel_sharding_strategy == "no_shard":
        raise NotApplicableError("the sharding strategy is no_shard, in which nothing is unsharded")
    store, is_float8 = fsdp.param_and_grad_buffer, float8_test(fsdp)
    listed, releasing = find_cell(fsdp, _LISTED), find_cell(fsdp, RELEASE)
    # Megatron-FSDP's hooks run only in forward and backward passes, when modules hold their raw
    # parameters. So a list stays valid until the model is wrapped again.
    bucket_of = store.param_to_param_group.__getitem__
    megatrons_list, release = listed.cell_contents, releasing.cell_contents

    @cache
    def list_of_unit(module: nn.Module, direction: str) -> CachedParameters:
        return CachedParameters(megatrons_list(module, direction), bucket_of, is_float8)

    @cache
    def all_of_unit(module: nn.Module) -> CachedParameters:
        return CachedParameters(list(module.parameters()), bucket_of, is_float8)

    def release_module_parameters(
        module: nn.Module, bwd: bool, lazy: bool = False, *unused: Any
    ) -> None:
        if not bwd:
            # For a unit that launched no graph; before any bucket of it is freed or kept.
            deferred.issue()
        release(all_of_unit(module), bwd, lazy)

    yield patch.replace_function(listed, patch.IN_CELL, list_of_unit)
    yield patch.replace_function(releasing, patch.IN_CELL, release_module_parameters)
    yield patch.replace_function(fsdp, _WAIT, _gathered(getattr(fsdp, _WAIT)))
    for group in store.parameter_groups:
        buffer = group.model_weight_buffer
        if buffer is not None and not any(map(is_float8, group.params)):
            yield patch.replace_function(buffer, _FETCH, _fetched(buffer))


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


def _fetched(buffer: Any) -> Callable[..., Any]:
    """A ``fetch_bucket`` that sets the parameters' data only if they do not point there yet."""
    original = buffer.fetch_bucket
    before: list[int] = []

    def addresses(bucket: Any) -> list[int]:
        return [tensor.data_ptr() for tensor in (bucket.data, *buffer.params)]

    def fetch_bucket(
        dtype: Any = None, set_param_data: bool = False, strict_assignments: bool = True
    ) -> Any:
        bucket = original(dtype, False, strict_assignments)
        if set_param_data and addresses(bucket) != before:
            bucket = original(dtype, True, strict_assignments)
            before[:] = addresses(bucket)
        return bucket

    return fetch_bucket
