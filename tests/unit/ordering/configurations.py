"""What is run: Megatron-FSDP by itself, graphs beside it, and the fast path in all of its ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.unit.fsdp.fast.test_path import Lending, with_penalty
from tests.unit.ordering.runs import Run, on_another_stream

_DENSE = ("attn", "mlp")
_EXPERTS: dict[str, Any] = {"experts": 16, "topk": 2}
_UNPOOLED = {"fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False}
_SHORT = {"suggested_communication_unit_size": 1000}
"""Parameters; fewer than a layer has, so that reductions are waited for early."""
_APART = {"overlap_grad_reduce": False, "overlap_param_gather": False}


def _sharded(strategy: str) -> dict[str, Any]:
    return {"data_parallel_sharding_strategy": strategy}


def _hooked(trainer: Any) -> None:
    """A weight with a hook of the user's, whose gradient is left to Megatron-FSDP."""
    for name, parameter in trainer.model.module.raw_param.items():
        if name.endswith("mlp.linear_fc2.weight"):
            parameter.register_post_accumulate_grad_hook(lambda _: None)


UPSTREAM = {
    "double buffers": Run(evaluates=True),
    "no double buffers": Run(fsdp=_UNPOOLED, evaluates=True),
    "experts": Run(shape=_EXPERTS, fsdp=_UNPOOLED),
    "ZeRO-2": Run(fsdp=_sharded("optim_grads"), evaluates=True),
    "ZeRO-1": Run(fsdp=_sharded("optim"), evaluates=True),
    "no shards": Run(fsdp=_sharded("no_shard")),
    "short queue": Run(fsdp={**_UNPOOLED, **_SHORT}),
    "nothing overlaps": Run(fsdp={**_sharded("optim"), **_APART}),
    "nothing overlaps, no shards": Run(fsdp={**_sharded("no_shard"), **_APART}),
}
"""Megatron-FSDP as it is."""
GRAPHS = {
    "graphs": Run(graphs=_DENSE),
    "graphs of experts' routers": Run(graphs=("attn", "moe_router"), shape=_EXPERTS),
    "graphs, ZeRO-2": Run(graphs=_DENSE, fsdp=_sharded("optim_grads")),
    "graphs, ZeRO-1": Run(graphs=_DENSE, fsdp=_sharded("optim")),
}
"""Graphs, and Megatron-FSDP's own bookkeeping."""
FAST = {
    "fast": Run(graphs=_DENSE, fast=True),
    "fast, evaluation": Run(graphs=_DENSE, fast=True, evaluates=True),
    "fast, one microbatch": Run(graphs=_DENSE, fast=True, microbatches=1),
    "fast, three microbatches": Run(graphs=("attn",), fast=True, microbatches=3),
    "fast, whole layers": Run(graphs=(), fast=True),
    "fast, experts": Run(
        graphs=("attn", "moe_router"), fast=True, shape=_EXPERTS, evaluates=True
    ),
    "fast, first layer only": Run(graphs=_DENSE, fast=True, only=(0,)),
    "fast, last layers only": Run(graphs=_DENSE, fast=True, only=(1, 2)),
    "fast, lent memory": Run(graphs=_DENSE, fast=True, backend=Lending),
    "fast, penalty": Run(graphs=("attn",), fast=True, before=lambda run: with_penalty(run.model)),
    "fast, gradients in fp32": Run(
        graphs=_DENSE, fast=True, fsdp={"megatron_fsdp_main_grads_dtype": torch.float32}
    ),
    "fast, short queue": Run(graphs=_DENSE, fast=True, fsdp=_SHORT),
    "fast, ZeRO-2": Run(graphs=_DENSE, fast=True, fsdp=_sharded("optim_grads")),
    "fast, ZeRO-1": Run(graphs=_DENSE, fast=True, fsdp=_sharded("optim")),
    "fast, no shards": Run(graphs=_DENSE, fast=True, fsdp=_sharded("no_shard")),
    "fast, no graphs": Run(fast=True, evaluates=True),
    "fast, no double buffers": Run(fast=True, fsdp=_UNPOOLED),
    "fast own, a hook of one's own": Run(fast=True, before=_hooked),
    "fast own, a last gradient from another stream": Run(
        fast=True, around=partial(on_another_stream, "input_layernorm.weight")
    ),
    "fast own, a first gradient from another stream": Run(
        fast=True, around=partial(on_another_stream, "mlp.linear_fc2.weight")
    ),
}
"""The fast path."""
