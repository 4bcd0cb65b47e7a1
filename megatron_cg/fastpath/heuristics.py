"""What cuBLASLt found out about products of experts, kept for longer.

A grouped GEMM is a GEMM for each expert, of as many rows as tokens came to that expert. For a
number of rows that it has not met cuBLASLt computes which kernel is best, 70 to 500 us of the host;
for one that it has met the whole GEMM takes 14 to 25 us (experts of 2048 by 1536 in bf16, H200,
cuBLAS 13.0). It remembers 8,192 problems. A layer of experts makes six of each number of rows, two
forward and four backward, so 1,365 numbers of rows fill that. Where routing is uneven there are
more, and what was found out is forgotten before it is asked for again: steps of 248 ms became steps
of 412 within 80 (``docs/performance.md``).

So more is remembered. Which kernel is taken stays as it is: the same question has the same answer,
and the numbers are the same to the last bit. The memory is the host's, 360 bytes a problem, and is
taken as problems are met.

Relied on: cuBLAS 13.0, ``cublasLtHeuristicsCacheGetCapacity``, ``-SetCapacity`` (public; the
figures of 8,192 and 360 are from "Heuristics Cache" in its documentation); transformer-engine
2.20.2, ``GroupedLinear``, which is what multiplies by experts.
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
from megatron_cg.fastpath.not_applicable import StepsAsideError
from megatron_cg.upstream.symbols import Symbol

_GROUPED = Symbol("transformer-engine", f"{MODULE}:GroupedLinear", "layers of experts")
RELIES_ON = (_GROUPED,)
VARIABLE = "CUBLASLT_HEURISTICS_CACHE_CAPACITY"
"""By which users choose a capacity themselves."""
ENTRIES = 1 << 18
"""Six problems of each of 43,690 numbers of rows; 94 MB of the host's memory if all are met."""


def install_heuristics(model: nn.Module, entries: int = ENTRIES) -> Callable[[], None]:
    """Let cuBLASLt remember ``entries`` problems in this process; returns the undo.

    Raises:
        StepsAsideError: the model has no grouped GEMM, the capacity was chosen by the variable or
            is as large already, or cuBLASLt is not there.
        UpstreamChangedError: TE's grouped GEMM is not where it was.
    """
    if VARIABLE in os.environ:
        raise StepsAsideError(f"{VARIABLE} is set")
    if not _has_experts(model):
        raise StepsAsideError(NO_EXPERTS)
    before = capacity()
    if before >= entries:
        raise StepsAsideError(f"cuBLASLt remembers {before} problems")
    if status := remember(entries):
        raise StepsAsideError(f"cuBLASLt does not remember {entries} problems (status {status})")

    def undo() -> None:
        remember(before)

    return undo


def capacity() -> int:
    """How many problems cuBLASLt remembers at most. Raises StepsAsideError where it is not said."""
    found = ctypes.c_size_t()
    if status := _library().cublasLtHeuristicsCacheGetCapacity(ctypes.byref(found)):
        raise StepsAsideError(f"cuBLASLt does not say what it remembers (status {status})")
    return found.value


def remember(entries: int) -> int:
    """Let cuBLASLt remember that many, or a few more; returns its status, 0 where it does."""
    return int(_library().cublasLtHeuristicsCacheSetCapacity(ctypes.c_size_t(entries)))


def _has_experts(model: nn.Module) -> bool:
    if MODULE not in sys.modules:
        return False
    grouped = _GROUPED.find()
    return any(isinstance(module, grouped) for module in model.modules())


def _library() -> Any:
    """The cuBLASLt that torch has loaded, and with it Transformer Engine."""
    if torch.version.cuda is None:
        raise StepsAsideError("torch was built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise StepsAsideError(f"{name} is not loaded") from error
