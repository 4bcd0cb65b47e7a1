"""Megatron's models under Megatron-FSDP v2 that ask for graphs.

Note [Weights that are filled after they were written]
    v2 allocates the weights that it computes with on its stream of gathers, and writes them on the
    current stream without a wait (megatron-core 0.20 at d98e8a64, ``parameter_group.py``, lines 171
    to 181). With deterministic algorithms ``torch.empty`` fills with NaN what it returns
    (``torch.utils.deterministic.fill_uninitialized_memory``), by a kernel on the first stream. If
    that one is late, losses are NaN from the first step. So here the write waits for the stream of
    the allocation. Nothing else of v2 needs a wait that it has not (``tests/unit/ordering``).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.upstream.patch import Undo, combine_undos, run_instead, set_attribute
from megatron_cg.upstream.symbols import Symbol

_MODEL: Any = getattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2", None)
_RULES = Symbol(
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallelV2._validate_config",
    "v2's rules of a model",
    parameters=("config", "ddp_config"),
)
_DBUFFER = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer:DBuffer"
_MEMORY = Symbol(_DBUFFER, "memory of a stream", attributes=("allocation_stream",))
_CAST = Symbol(
    f"{_DBUFFER}.cast",
    "what writes weights to compute with, at first into memory that is there",
    parameters=("dtype", "out"),
)
RELIES_ON = () if _MODEL is None else (_RULES, _MEMORY, _CAST)


def allow_graphs() -> Undo:
    """Let Megatron-FSDP v2 wrap models that ask for graphs of layers; returns the undo.

    Inside of a graph of Megatron's own, v2's hooks would gather weights into memory that moves, so
    it refuses such models. Here they run around the graphs, in memory that stays. Its other rules
    apply. Weights are written in order; see the note above. Before 0.20 megatron-core has no v2.
    A v2 that has changed keeps its rules, which refuse such models; ``megatron-cg doctor`` says so.
    """
    try:
        _MEMORY.find()
        rules, mended = _RULES.find(), run_instead(_CAST, _cast)
    except UpstreamChangedError:
        return lambda: None

    def check(config: Any, ddp_config: Any, *rest: Any, **named: Any) -> None:
        if config.cuda_graph_impl == "transformer_engine":
            config, ddp_config = copy.copy(config), copy.copy(ddp_config)
            config.cuda_graph_impl, ddp_config.megatron_fsdp_cuda_graph_mode = "none", False
        rules(config, ddp_config, *rest, **named)

    return combine_undos((set_attribute(_MODEL, "_validate_config", staticmethod(check)), mended))


def _cast(cast: Callable[..., Any], buffer: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """See Note [Weights that are filled after they were written]."""
    if out is not None and out.allocation_stream is not None:
        torch.cuda.current_stream(out.device).wait_stream(out.allocation_stream)
    return cast(buffer, dtype, out=out)
