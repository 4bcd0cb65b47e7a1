"""Unsharding and resharding with a few calls per bucket, instead of a few per parameter.

Note [Shown one parameter a bucket]
    Megatron-FSDP takes lists of parameters where it means their buckets. It gathers, waits for and
    releases each bucket once, and skips all further parameters of the bucket. So it gets only one
    parameter per bucket here, and every FP8 parameter, because it also manages the FP8 caches.
    What it does with a bucket does not change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

from torch import nn

from megatron_cg.fastpath.gather import DeferredPrefetch
from megatron_cg.fastpath.part import NotApplicableError, find_cell, float8_test, hook_functions
from megatron_cg.fsdp.fsdp_symbols import fsdp_function
from megatron_cg.upstream.patch import put_over, put_over_cell

_LISTED, _RELEASE = "_param_list_for_submodule_unshard", "release_module_parameters"
_HOOKS, _WALKS = "MegatronFSDP._register_fsdp_hooks.<locals>", "what walks over parameters"
REPLACES = (
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
RELIES_ON = REPLACES


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
        undo.callback(put_over_cell(listed, list_of_unit))
        released = _released(release.cell_contents, all_of_unit, after_backward, deferred)
        undo.callback(put_over_cell(release, released))
        gather = "all_gather_and_wait_parameters_ready"
        undo.callback(put_over(fsdp, gather, _gathered(getattr(fsdp, gather))))
        for group in store.parameter_groups:
            buffer = group.model_weight_buffer
            if buffer is not None and not any(map(is_float8, group.params)):
                undo.callback(put_over(buffer, "fetch_bucket", _fetched(buffer)))
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
