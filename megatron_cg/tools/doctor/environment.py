"""Checks environment variables that affect a run with graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_cg.arguments.rules_environment import expandable_segments, max_connections
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.tools.doctor.finding import Finding, note, of_violation, ok, warning
from megatron_cg.tools.doctor.system import System

MEANINGS = {
    "PYTORCH_ALLOC_CONF": "settings of torch's allocator, from whose pools graphs get their memory",
    "PYTORCH_CUDA_ALLOC_CONF": "the older name of PYTORCH_ALLOC_CONF",
    "NCCL_GRAPH_REGISTER": "0: NCCL does not register the buffers of captured collectives, which "
    "expandable segments need; otherwise it does",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues that streams share; Megatron-FSDP refuses 1",
    "CUBLAS_WORKSPACE_CONFIG": "fixed workspaces (:4096:8) make cuBLAS repeat itself bit for bit; "
    "--deterministic-mode sets it",
    "CUBLASLT_HEURISTICS_CACHE_CAPACITY": "number of GEMM problems whose best kernel cuBLASLt "
    "remembers; python -m megatron_cg sets it to 262144 if it is not set",
    "NCCL_ALGO": "which algorithms NCCL may use; --deterministic-mode takes Ring, CollnetDirect, "
    "CollnetChain or ^NVLS and refuses others",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0: TE uses attention kernels that repeat themselves bit "
    "for bit; --deterministic-mode sets it",
    "NVTE_USE_CUTLASS_GROUPED_GEMM": "1: TE multiplies all experts of a layer in one CUTLASS "
    "kernel instead of one cuBLAS call each; compare only runs that have the same choice",
    "NVTE_FLASH_ATTN": "1 allows flash attention in TE, 0 forbids it",
    "NVTE_FUSED_ATTN": "1 allows cuDNN's fused attention in TE, 0 forbids it",
    "NVTE_UNFUSED_ATTN": "1 allows TE's slow, unfused attention, 0 forbids it",
    "NVTE_DEBUG": "1 with NVTE_DEBUG_LEVEL=2: TE prints which attention it chose, and why",
    "CUDNN_HOME": "where TE looks for libcudnn.so before anywhere else",
    "CUDNN_PATH": "where TE looks for libcudnn.so after CUDNN_HOME",
    "CUDA_HOME": "where TE looks for CUDA's libraries, and compilers for CUDA",
    "LD_LIBRARY_PATH": "where libraries opened by a bare name are looked for first; torch's wheels "
    "find their own before it",
    "LD_PRELOAD": "libraries that are loaded before all others, torch's own too",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a run sees",
    "CUDA_LAUNCH_BLOCKING": "1: the host waits for every kernel, which helps to find a fault",
    "CUDA_MODULE_LOADING": "LAZY (the default) or EAGER loading of kernels",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0: a rank whose NCCL fails does not end, and others wait",
    "TORCH_NCCL_BLOCKING_WAIT": "1: the host waits at each collective",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "tensors of a collective are kept by reference, and not by "
    "the allocator's record of streams",
    "TORCH_NCCL_ENABLE_TIMING": "1: torch records an event before each collective too",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "torch ends the process after this time without a "
    "heartbeat of its watchdog; a long capture can exceed it",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1: every allocation is registered with NCCL",
}
"""The effect of each variable. Sources: torch 2.11 (``ProcessGroupNCCL.hpp``, allocator notes),
transformer-engine 2.20.2, megatron-core 0.19.2 (``megatron/training/determinism.py``), NCCL's and
CUDA's own lists of variables."""

_FAMILIES = {
    "TORCH_NCCL_": "read by torch's process groups",
    "NVTE_": "read by Transformer Engine",
    "NCCL_": "read by NCCL",
}
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def variables(system: System) -> Iterator[Finding]:
    """Each variable that is set and matters, with its effect; broken rules first."""
    env = system.variables
    environment = Environment(variables=dict(env), backend=system.backend)
    told = set()
    for rule in (expandable_segments, max_connections):
        for violation in rule(RunArguments(), GraphArguments(), environment):
            told.add(violation.found.partition("=")[0])
            yield of_violation(violation)
    for name in sorted(env.keys() - told):
        meaning = MEANINGS.get(name) or _of_a_family(name)
        if meaning is not None:
            yield _mistake(name, env) or note(f"{name}={env[name]}", meaning)
    unset = sum(name not in env for name in MEANINGS)
    yield ok(f"{unset} of {len(MEANINGS)} variables that matter here are not set")


def _of_a_family(name: str) -> str | None:
    texts = (text for prefix, text in _FAMILIES.items() if name.startswith(prefix))
    text = next(texts, None)
    return text and f"{text}; it was not set in the runs that verified this package"


def _mistake(name: str, env: Mapping[str, str]) -> Finding | None:
    """A warning for a value that is probably not intended."""
    value, unset = env[name], f"unset {name}"
    where, meaning = f"{name}={value}", MEANINGS.get(name)
    if name in _ATTENTION:
        return warning(
            where,
            f"{meaning}; Megatron sets it from --attention-backend and ends the run when it finds "
            "another value",
            f"unset {' '.join(other for other in _ATTENTION if other in env)}",
        )
    if name.endswith("ALLOC_CONF") and "cudaMallocAsync" in value:
        return warning(
            where,
            "graphs were never tested with CUDA's own allocator: their private pools, and the "
            "cleanup after a failed capture, need torch's native allocator",
            unset,
        )
    is_place = name in ("CUDNN_HOME", "CUDNN_PATH")
    if is_place and not (value and any(Path(value).glob("**/libcudnn.so*"))):
        why = f"{meaning}, so TE silently tries the next place"
        return warning(f"{where}, where there is no libcudnn.so", why, unset)
    if name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
        why = f"{meaning}: step times mean nothing, above all the gain from graphs"
        return warning(where, why, unset)
    return None
