"""What is run: Megatron-FSDP by itself, graphs beside it, and the fast path in all of its ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.unit.fastpath.test_fast_path import BorrowingTape, with_penalty
from tests.unit.ordering.runs import Run, on_another_stream, traced, traced_grouped_gemms
from tests.unit.ordering.trace import Trace

_FAST = "fast path, "
_DENSE = ("attn", "mlp")
_EXPERTS: dict[str, Any] = {"experts": 4, "topk": 2}
_UNPOOLED = {"fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False}
_SHORT = {"suggested_communication_unit_size": 1000}
"""Parameters; fewer than a layer has, so that reductions are waited for early."""
_SUMS_IN_FP32 = {"megatron_fsdp_main_grads_dtype": torch.float32}
_OUTER = {"num_distributed_optimizer_instances": 2}
_OUTER_SHARDS = {"outer_dp_sharding_strategy": "optim"}
_APART = {"overlap_grad_reduce": False, "overlap_param_gather": False}


def _sharded(strategy: str) -> dict[str, Any]:
    return {"data_parallel_sharding_strategy": strategy}


def _hooked(trainer: Any) -> None:
    """Give weights a user hook: their gradients are left to Megatron-FSDP."""
    for name, parameter in trainer.model.module.raw_param.items():
        if name.endswith("mlp.linear_fc2.weight"):
            parameter.register_post_accumulate_grad_hook(lambda _: None)


POOLED = {
    "double buffers": Run(evaluates=True),
    "double buffers, experts, graphs": Run(graphs=("attn", "moe_router"), shape=_EXPERTS),
}
"""Megatron-FSDP's own bookkeeping with double buffers, which has a known race."""
SEVERAL_STREAMS = {
    "no double buffers, a gradient from another stream": Run(
        fsdp=_UNPOOLED, around=partial(on_another_stream, "mlp.linear_fc1.weight")
    ),
}
"""Megatron-FSDP's own bookkeeping of gradients of several streams, with another known race."""
UPSTREAM = {
    "no double buffers": Run(fsdp=_UNPOOLED, evaluates=True),
    "no double buffers, short queue, experts": Run(fsdp={**_UNPOOLED, **_SHORT}, shape=_EXPERTS),
    "ZeRO-2": Run(fsdp=_sharded("optim_grads"), evaluates=True),
    "ZeRO-2, graphs": Run(graphs=_DENSE, fsdp=_sharded("optim_grads")),
    "ZeRO-1": Run(fsdp=_sharded("optim"), evaluates=True),
    "ZeRO-1, nothing overlaps": Run(fsdp={**_sharded("optim"), **_APART}),
    "no shards": Run(fsdp=_sharded("no_shard")),
}
"""Megatron-FSDP's own bookkeeping."""
FAST = {
    "dense": Run(graphs=_DENSE, fast=True, evaluates=True),
    "attention, three microbatches": Run(graphs=("attn",), fast=True, microbatches=3),
    "experts": Run(graphs=("attn", "moe_router"), fast=True, shape=_EXPERTS, evaluates=True),
    "first and last layer": Run(graphs=_DENSE, fast=True, only=(0, 2), evaluates=True),
    "borrowed memory": Run(graphs=_DENSE, fast=True, backend=BorrowingTape),
    "penalty": Run(graphs=("attn",), fast=True, before=lambda run: with_penalty(run.model)),
    "short queue, one microbatch": Run(graphs=_DENSE, fast=True, fsdp=_SHORT, microbatches=1),
    "ZeRO-2": Run(graphs=_DENSE, fast=True, fsdp=_sharded("optim_grads")),
    "ZeRO-1": Run(graphs=_DENSE, fast=True, fsdp=_sharded("optim")),
    "no shards": Run(graphs=_DENSE, fast=True, fsdp=_sharded("no_shard")),
    "no graphs, gradients in fp32": Run(fast=True, evaluates=True, fsdp=_SUMS_IN_FP32),
    "no double buffers": Run(fast=True, fsdp=_UNPOOLED, evaluates=True),
    "a hook of the user's": Run(fast=True, before=_hooked),
    "the first gradient from another stream": Run(
        fast=True, around=partial(on_another_stream, "mlp.linear_fc2.weight")
    ),
    "a gradient from another stream": Run(
        fast=True, around=partial(on_another_stream, "mlp.linear_fc1.weight")
    ),
    "the last gradient from another stream": Run(
        fast=True, around=partial(on_another_stream, "input_layernorm.weight")
    ),
}
"""The fast path, with double buffers unless the name says otherwise."""
ALONE = {
    "one rank": Run(graphs=_DENSE, fast=True, evaluates=True),
    "one rank, experts": Run(graphs=("attn", "moe_router"), fast=True, shape=_EXPERTS),
}
"""The fast path where no other rank has a part of a buffer."""
OUTER = {
    "outer groups, shards": Run(fsdp={**_UNPOOLED, **_OUTER, **_OUTER_SHARDS}),
    "fast path, outer groups": Run(graphs=_DENSE, fast=True, fsdp=_OUTER),
    "fast path, outer groups, shards": Run(
        graphs=_DENSE, fast=True, fsdp={**_OUTER, **_OUTER_SHARDS}
    ),
}
"""Four ranks, in two groups of two."""
GROUPED = ("once", "used beside")
"""Grouped GEMMs on the fast path, as ``tests/unit/fastpath/test_detached.py`` calls them."""


Configurations = dict[str, Callable[[], Trace]]
"""What traces each configuration, by its name."""


def configurations() -> dict[int, Configurations]:
    """The configurations for each number of ranks."""

    def named(runs: dict[str, Run], prefix: str = "") -> Configurations:
        return {f"{prefix}{name}": partial(traced, run) for name, run in runs.items()}

    grouped: Configurations = {
        f"{_FAST}grouped GEMMs {way}": partial(traced_grouped_gemms, way) for way in GROUPED
    }
    upstream = named({**POOLED, **SEVERAL_STREAMS, **UPSTREAM})
    return {
        1: named(ALONE, _FAST),
        2: {**upstream, **named(FAST, _FAST), **grouped},
        4: named(OUTER),
    }
