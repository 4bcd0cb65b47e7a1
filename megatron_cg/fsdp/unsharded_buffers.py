"""The memory of Megatron-FSDP that a unit's graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.fsdp.sharding import REPLACED, watched_tensors
from megatron_cg.replay.guard.addresses import Watched

RELIES_ON = (
    *fsdp_class("MegatronFSDP", "data_parallel_sharding_strategy"),
    *fsdp_class("ParamAndGradBuffer", "param_to_param_group", "parameter_groups", "ddp_config"),
    *fsdp_class("ParameterGroup", "fsdp_unit_id"),
)


def watched_memory(fsdp: Any, layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Watched]:
    """Parameters and buffers of ``graphed`` whose addresses its graph holds.

    If FSDP points all parameters of a bucket at the bucket together, the first parameter stands for
    all of them; see Note [One address a bucket].
    """
    store = fsdp.param_and_grad_buffer
    together = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
    seen: set[int] = set()

    def described(parameter: nn.Parameter, name: str) -> tuple[str, str] | None:
        group = store.param_to_param_group.get(parameter)
        if group is None:
            return name, REPLACED
        if together and group in seen:
            return None
        seen.add(group)
        unit = store.parameter_groups[group].fsdp_unit_id
        return f"{name} (bucket {group} of FSDP unit {unit})", _moved(store.ddp_config, group, unit)

    return watched_tensors(layer, graphed, described)


def _moved(config: Any, bucket: int, unit: int | None) -> str:
    """Why the buffer of a bucket may have moved, and what to set."""
    off = [
        flag
        for flag, name in (
            ("--fsdp-double-buffer", "fsdp_double_buffer"),
            ("--fsdp-db-use-persist-buf-on-alloc-fail", "fsdp_db_use_persist_buf_on_alloc_fail"),
        )
        if not getattr(config, name, False)
    ]
    moved = f"The FSDP buffer of unit {unit} (bucket {bucket}) moved"
    if off:
        verb = "are" if len(off) > 1 else "is"
        return f"{moved}: {' and '.join(off)} {verb} off."
    return (
        f"{moved} although double buffers are on: its memory was freed and allocated anew, or the "
        "bucket was given the other of the two buffers."
    )
