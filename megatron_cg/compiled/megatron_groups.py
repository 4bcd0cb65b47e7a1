"""Megatron's process groups by role."""

from __future__ import annotations

import torch.distributed as dist

from megatron_cg.upstream.symbols import Symbol

_STATE = "megatron.core.parallel_state"
_ROLES = {
    "tp": Symbol(
        "megatron-core", f"{_STATE}:get_tensor_model_parallel_group", "the tensor-parallel group"
    ),
    "cp": Symbol("megatron-core", f"{_STATE}:get_context_parallel_group", "the context group"),
    "ep": Symbol(
        "megatron-core", f"{_STATE}:get_expert_model_parallel_group", "the expert-parallel group"
    ),
    "etp": Symbol(
        "megatron-core",
        f"{_STATE}:get_expert_tensor_parallel_group",
        "the tensor-parallel group of experts",
    ),
    "tp-ep": Symbol(
        "megatron-core",
        f"{_STATE}:get_expert_tensor_and_model_parallel_group",
        "the tensor- and expert-parallel group of experts",
    ),
}
RELIES_ON = tuple(_ROLES.values())


def megatron_groups() -> dict[str, dist.ProcessGroup]:
    """The groups of this rank that a layer's collectives use, for ``Region.groups``.

    Data-parallel groups are not among them, so an artifact serves runs of any data-parallel size.
    Megatron's ``initialize_model_parallel`` must have been called.
    """
    return {role: symbol.find()() for role, symbol in _ROLES.items()}
