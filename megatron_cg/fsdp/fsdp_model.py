"""Finds a model's Megatron-FSDP wrapper, and sets its raw parameters during a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.fsdp.roles import fsdp_package_of
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import changed

_NEEDED = (
    "_replace_param_with_raw_if_needed",
    "is_param_fsdp_distributed",
    "synchronize_param_gather",
    "start_param_sync",
    "param_and_grad_buffer",
    "all_gather_pipeline",
)
RELIES_ON = (
    *fsdp_class("MegatronFSDP", *_NEEDED, "_training_state"),
    *fsdp_class("AllGatherPipeline", "all_gather_params", "bucket_status", "buffer"),
    *fsdp_class("AllGatherPipeline", "param_gather_event_map", "wait_bucket_ready"),
    *fsdp_class("ParamAndGradBuffer", "double_buf_units", "param_to_param_group"),
    *fsdp_class("ParamAndGradBuffer", "parameter_groups"),
)


def find_megatron_fsdp(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` that ``model`` is or contains (either package's), or None.

    Raises UpstreamChangedError when it lacks a member that capture relies on.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ != "MegatronFSDP":
            continue
        distribution = fsdp_package_of(kind.forward)
        if distribution is None:
            continue
        for name in _NEEDED:
            if not hasattr(module, name):
                raise changed(distribution, f"MegatronFSDP.{name}", "a member of the wrapped model")
        return module
    return None


@contextmanager
def raw_parameters(fsdp: Any) -> Iterator[None]:
    """Give the modules their raw parameters, as in a forward pass, and undo it on exit.

    Between steps Megatron-FSDP replaces the parameters with sharded DTensors. A graph must be
    captured with the raw ones: a replay passes them to autograd, and the post-accumulate-grad hooks
    are registered on them.

    On exit, this waits for the all-gathers that capture prefetched and releases their buckets (a
    bucket left in flight would make the next step's reset warn and wait). The parameters are then
    sharded or raw, as they were before.
    """
    was_distributed = bool(fsdp.is_param_fsdp_distributed)
    fsdp._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        # Its reset does the same, but with a warning that lists every bucket.
        pipeline = fsdp.all_gather_pipeline
        for bucket, bwd in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(bucket, bwd)
        # A gather that failed at its start left nothing to wait for, and reset would fail on it.
        for key, status in pipeline.bucket_status.items():
            if status.name == "COMMUNICATING":
                pipeline.bucket_status[key] = type(status).READY_TO_USE
        fsdp.synchronize_param_gather()
        if not was_distributed:
            fsdp.start_param_sync()


def gather_alone(fsdp: Any, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Disable prefetch if ``parameters`` cover only some of the units that share two buffers.

    Megatron-FSDP's hooks also gather the next unit, into the other buffer. If that unit is not
    captured, no hook releases it at capture, and the unit after it finds no buffer. If all units
    are captured, their hooks release them. Prefetch then stays on: in a capture before the first
    step, each unit gets its permanent buffer.

    ``parameters`` are the raw ones. Returns the undo.
    """
    pipeline = fsdp.all_gather_pipeline
    store = pipeline.buffer
    groups = {store.param_to_param_group.get(parameter) for parameter in parameters} - {None}
    captured = {store.parameter_groups[group].fsdp_unit_id for group in groups}
    if captured.issuperset(store.double_buf_units):
        return lambda: None
    gather = pipeline.all_gather_params

    def alone(params: Any, prefetch: bool = False, **options: Any) -> None:
        gather(params, prefetch=False, **options)

    return put_over(pipeline, "all_gather_params", alone)


@contextmanager
def training_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore Megatron-FSDP's ``_training_state`` of every module on exit."""
    saved = [
        (module, module._training_state) for module in modules if hasattr(module, "_training_state")
    ]
    try:
        yield
    finally:
        for module, state in saved:
            module._training_state = state
