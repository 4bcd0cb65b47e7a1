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

import inspect
import sys
from collections.abc import Mapping
from types import CodeType

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.upstream.symbols import Symbol

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
        f"{_FAST}.optimizer.clipping:LocalClip.__call__",
    ),
    "optimizer step: start_param_sync": (f"{_FSDP}.megatron_fsdp:MegatronFSDP.start_param_sync",),
    "exchange of parameters": (
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._replace_param_with_distributed_if_needed",
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._replace_param_with_raw_if_needed",
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
        f"{_DDP}.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer",
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.zero_grad",
    ),
    "unshard": (
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.all_gather_and_wait_parameters_ready",
        f"{_FAST}.params.unshard:_gathered.<locals>.all_gather_and_wait_parameters_ready",
        f"{_FAST}.params.deferred_prefetch:DeferredPrefetch.launched",
        f"{_HOOKS}.<locals>._pre_forward_param_unshard",
        f"{_HOOKS}.<locals>._pre_backward_param_unshard",
    ),
    "unshard: wait": (f"{_BUFFER}:AllGatherPipeline.wait_bucket_ready",),
    "unshard: gather": (
        f"{_BUFFER}:AllGatherPipeline.async_bucket_gather",
        f"{_FAST}.params.gather:Gathers.async_bucket_gather",
    ),
    "reshard": (
        f"{_HOOKS}.<locals>.release_module_parameters",
        f"{_FAST}.params.unshard:_released.<locals>.release_module_parameters",
    ),
    "gradient bucketing": (
        f"{_HOOKS}.<locals>._process_post_backward_gradients",
        f"{_HOOKS}.<locals>._root_post_backward",
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
        "megatron_cg.replay.depends_on:DependsOn.broken",
        "megatron_cg.replay.depends_on:DependsOn.broken_in_backward",
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
"""Functions as in ``Symbol.path``."""


def find_phases(
    phases: Mapping[str, tuple[str, ...]] = PHASES,
) -> tuple[dict[CodeType, str], list[str]]:
    """The phase of each code, and the functions that are missing in the imported modules."""
    codes: dict[CodeType, str] = {}
    missing = []
    for phase, paths in phases.items():
        for path in paths:
            code = find_code(path)
            if code is None:
                missing.append(path)
            else:
                codes[code] = phase
    return codes, missing


def find_code(path: str) -> CodeType | None:
    """The code of a function, or None if there is none in the imported modules."""
    module, _, name = path.partition(":")
    if module not in sys.modules:
        return None
    try:
        found = inspect.unwrap(Symbol(module.partition(".")[0], path, name).find())
    except UpstreamChangedError:
        return None
    code = getattr(found, "__code__", found)
    return code if isinstance(code, CodeType) else None
