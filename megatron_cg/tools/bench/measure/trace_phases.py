"""Defines the phases of a training step by their functions.

A phase is identified by code objects, so nothing is replaced to observe it. This package's guards
would report a replaced hook as a mismatch. Megatron-FSDP's hooks are closures that no attribute
refers to.

Relied on: megatron-core 0.19.2 (functions and nested functions named in ``PHASES``), torch 2.11
(``torch.cuda.graphs:CUDAGraph.replay``) and this package. A missing function is left out and named
in the result. Nothing is imported for it: a module that is not imported when a model trains does
not run either.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

_SCHEDULE = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZER = "megatron.core.optimizer"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_HOOKS = f"{_FSDP}.megatron_fsdp:MegatronFSDP._register_fsdp_hooks"
_BUFFER = f"{_FSDP}.param_and_grad_buffer"
_DDP = "megatron.core.distributed"
_BUCKETS = f"{_DDP}.param_and_grad_buffer:_ParamAndGradBucketGroup"
_FAST = "megatron_cg.fastpath"

PHASES: Mapping[str, tuple[str, ...]] = {
    "forward": (f"{_SCHEDULE}:forward_step",),
    "backward": (f"{_SCHEDULE}:backward_step",),
    "gradient finish": (f"{_DDP}.finalize_model_grads:finalize_model_grads",),
    "optimizer step": (
        f"{_OPTIMIZER}.optimizer:MixedPrecisionOptimizer.step",
        f"{_OPTIMIZER}.optimizer:FP32Optimizer.step",
        f"{_OPTIMIZER}.optimizer:ChainedOptimizer.step",
    ),
    "optimizer step: update": (
        f"{_OPTIMIZER}.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
    ),
    "optimizer step: clipping": (
        f"{_OPTIMIZER}.optimizer:MegatronOptimizer.clip_grad_norm",
        f"{_FAST}.optimizer.clip:LocalClip.__call__",
    ),
    "optimizer step: start_param_sync": (f"{_FSDP}.megatron_fsdp:MegatronFSDP.start_param_sync",),
    "exchange of parameters": (
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._replace_param_with_distributed_if_needed",
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._replace_param_with_raw_if_needed",
        f"{_FAST}.params.swap:_exchange/exchange",
    ),
    "main gradients": (
        f"{_BUFFER}:ParamAndGradBuffer.update_main_grads",
        f"{_FAST}.optimizer.main_weights:_GradientTable.__call__",
    ),
    "main weights": (
        f"{_BUFFER}:ParamAndGradBuffer.copy_main_weights_to_model_weights",
        f"{_FAST}.optimizer.main_weights:_WeightTable.__call__",
    ),
    "zero gradients": (
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.zero_grad_buffer",
        f"{_FAST}.optimizer.zero:install_zero/zero_grad_buffer",
        f"{_DDP}.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.zero_grad",
    ),
    "unshard": (
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.all_gather_and_wait_parameters_ready",
        f"{_FAST}.params.unshard:_gathered/all_gather_and_wait_parameters_ready",
        f"{_FAST}.params.gather:Gathers.begin_pass",
        f"{_FAST}.params.deferred_prefetch:DeferredPrefetch.launched",
        f"{_HOOKS}/_pre_forward_param_unshard",
        f"{_HOOKS}/_pre_backward_param_unshard",
    ),
    "unshard: wait": (f"{_BUFFER}:AllGatherPipeline.wait_bucket_ready",),
    "unshard: gather": (
        f"{_BUFFER}:AllGatherPipeline.async_bucket_gather",
        f"{_FAST}.params.gather:Gathers.async_bucket_gather",
    ),
    "reshard": (
        f"{_HOOKS}/release_module_parameters",
        f"{_FAST}.params.unshard:_released/release_module_parameters",
    ),
    "gradient bucketing": (
        f"{_HOOKS}/_process_post_backward_gradients",
        f"{_HOOKS}/_root_post_backward",
        f"{_FAST}.gradients.bucketing:GradientBucketing.__call__",
        f"{_FAST}.gradients.bucketing:GradientBucketing.take_detached",
        f"{_FAST}.gradients.bucketing:GradientBucketing.unit_is_done",
    ),
    "gradient reduce": (f"{_BUFFER}:GradReducePipeline.reduce_gradients",),
    "gradient reduce: wait": (f"{_BUFFER}:GradReducePipeline.wait_for_previous_grad_reduce",),
    "DDP: gradient ready": (f"{_BUCKETS}.register_grad_ready",),
    "DDP: reduce": (f"{_BUCKETS}.start_grad_sync", f"{_BUCKETS}.finish_grad_sync"),
    "DDP: gather": (f"{_BUCKETS}.start_param_sync", f"{_BUCKETS}.finish_param_sync"),
    "replay": ("megatron.core.transformer.module:GraphableMegatronModule._te_cuda_graph_replay",),
    "replay: launch": ("torch.cuda.graphs:CUDAGraph.replay",),
    "guard": (
        "megatron_cg.replay.guard:Guard.broken",
        "megatron_cg.replay.guard:Guard.broken_in_backward",
    ),
    "guard: around a replay": (
        "megatron_cg.replay.guard.inputs:Inputs.copied",
        "megatron_cg.replay.guarded_graph:GuardedGraph._guard_backward",
    ),
    "votes": (
        "megatron_cg.consensus.boundary:Boundary.before_step",
        "megatron_cg.consensus.boundary:Boundary.after_step",
    ),
    "votes: post": ("megatron_cg.consensus.exchange:Agreement.post",),
    "votes: wait": ("megatron_cg.consensus.exchange:Agreement.collect",),
    "log": ("megatron.training.training:training_log",),
}
"""Functions as ``module:Class.function``, nested ones after a slash."""


@dataclass
class Found:
    """The code of each phase, and the functions that are missing."""

    codes: dict[CodeType, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def find_phases(phases: Mapping[str, tuple[str, ...]] = PHASES) -> Found:
    """Look up all of them in the imported modules."""
    found = Found()
    for phase, paths in phases.items():
        for path in paths:
            code = find_code(path)
            if code is None:
                found.missing.append(path)
            else:
                found.codes[code] = phase
    return found


def find_code(path: str) -> CodeType | None:
    """The code of ``module:Class.function/nested``, or None if there is no such function."""
    outer, *nested = path.split("/")
    module, _, name = outer.partition(":")
    try:
        value: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None
    code = _code_of(value)
    for inner in nested:
        constants = code.co_consts if code is not None else ()
        codes = (constant for constant in constants if isinstance(constant, CodeType))
        code = next((found for found in codes if found.co_name == inner), None)
    return code


def _code_of(value: Any) -> CodeType | None:
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, FunctionType) else None
