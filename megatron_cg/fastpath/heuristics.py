"""A larger cache of cuBLASLt's heuristics, for grouped GEMMs of experts.

A grouped GEMM runs one GEMM per expert, with as many rows as the expert got tokens. For a new
number of rows cuBLASLt computes which kernel is best, which takes 70 to 500 us of host time. For a
cached one the whole GEMM takes 14 to 25 us (experts of 2048 by 1536 in bf16, H200, cuBLAS 13.0).
The cache holds 8,192 problems. A layer of experts has six problems per number of rows, two forward
and four backward, so 1,365 numbers of rows fill the cache. Uneven routing produces more of them,
and entries are evicted before they are needed again: steps of 248 ms became steps of 412 ms within
80 steps (``docs/performance.md``).

So the cache is enlarged. The choice of kernels does not change: the same problem has the same
answer, and results are bitwise identical. The cache is host memory, 360 bytes per problem,
allocated as problems occur.

The numbers 8,192 and 360 are from "Heuristics Cache" in the documentation of cuBLAS 13.0.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath.gradients.detached_weights import MODULE, NO_EXPERTS
from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.upstream.symbols import Symbol

_GROUPED = Symbol("transformer-engine", f"{MODULE}:GroupedLinear", "layers of experts")
RELIES_ON = (_GROUPED,)
VARIABLE = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
"""The environment variable with which users set the capacity."""
ENTRIES = 1 << 18
"""Six problems for each of 43,690 numbers of rows; 94 MB of host memory when full."""


def install_heuristics(model: nn.Module, entries: int = ENTRIES) -> Callable[[], None]:
    """Enlarge cuBLASLt's cache to ``entries`` problems in this process; returns the undo.

    Raises:
        NotApplicableError: the model has no grouped GEMM, the user set the variable, the capacity
            is large enough already, or cuBLASLt is not loaded.
        UpstreamChangedError: TE's grouped GEMM has moved.
    """
    if VARIABLE in os.environ:
        raise NotApplicableError(f"{VARIABLE} is set")
    if not _has_experts(model):
        raise NotApplicableError(NO_EXPERTS)
    before = capacity()
    if before >= entries:
        raise NotApplicableError(f"cuBLASLt remembers {before} problems")
    if status := remember(entries):
        raise NotApplicableError(f"cuBLASLt does not remember {entries} problems (status {status})")

    def undo() -> None:
        remember(before)

    return undo


def capacity() -> int:
    """The capacity of cuBLASLt's cache, in problems. Raises NotApplicableError if it is unknown."""
    found = ctypes.c_size_t()
    if status := _library().cublasLtHeuristicsCacheGetCapacity(ctypes.byref(found)):
        raise NotApplicableError(f"cuBLASLt does not say what it remembers (status {status})")
    return found.value


def remember(entries: int) -> int:
    """Set the capacity to ``entries`` or slightly more; returns cuBLASLt's status, 0 on success."""
    return int(_library().cublasLtHeuristicsCacheSetCapacity(ctypes.c_size_t(entries)))


def _has_experts(model: nn.Module) -> bool:
    if MODULE not in sys.modules:
        return False
    grouped = _GROUPED.find()
    return any(isinstance(module, grouped) for module in model.modules())


def _library() -> Any:
    """The cuBLASLt library that torch has loaded; Transformer Engine uses the same one."""
    if torch.version.cuda is None:
        raise NotApplicableError("torch was built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise NotApplicableError(f"{name} is not loaded") from error
