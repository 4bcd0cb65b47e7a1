"""Megatron's models under Megatron-FSDP v2 that ask for graphs."""

import copy
from typing import Any

from megatron.core.distributed.fsdp import mcore_fsdp_adapter

from megatron_cg.upstream.patch import Undo, set_attribute
from megatron_cg.upstream.symbols import Symbol

_MODEL: Any = getattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2", None)
_RULES = Symbol(
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallelV2._validate_config",
    "v2's rules of a model",
    parameters=("config", "ddp_config"),
)
RELIES_ON = () if _MODEL is None else (_RULES,)


def allow_graphs() -> Undo:
    """Let Megatron-FSDP v2 wrap models that ask for graphs of layers; returns the undo.

    Inside of a graph of Megatron's own, v2's hooks would gather weights into memory that moves, so
    it refuses such models. Here they run around the graphs, in memory that stays. Its other rules
    apply. Before 0.20 megatron-core has no v2.

    Raises UpstreamChangedError if v2 has no such rules.
    """
    if _MODEL is None:
        return lambda: None
    rules = _RULES.find()

    def check(config: Any, ddp_config: Any, *rest: Any, **named: Any) -> None:
        if config.cuda_graph_impl == "transformer_engine":
            config, ddp_config = copy.copy(config), copy.copy(ddp_config)
            config.cuda_graph_impl, ddp_config.megatron_fsdp_cuda_graph_mode = "none", False
        rules(config, ddp_config, *rest, **named)

    return set_attribute(_MODEL, "_validate_config", staticmethod(check))
