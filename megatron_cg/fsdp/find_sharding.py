"""Finds how a model is sharded."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.errors import HookError
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.fsdp.fully_shard import FullyShard
from megatron_cg.fsdp.megatron_fsdp import MegatronFsdp
from megatron_cg.fsdp.megatron_fsdp_v2 import MegatronFsdpV2, is_sharded
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.fsdp.unsharded import Unsharded


def find_sharding(model: nn.Module) -> Sharding:
    """The sharding of ``model``: of the model itself, or of a module in it.

    Raises:
        HookError: the model is sharded in more than one way, by torch's FSDP1, or by Megatron's
            DistributedDataParallel.
        UpstreamChangedError: the sharding lacks a member that we rely on.
    """
    fsdp = find_megatron_fsdp(model)
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    shardings: list[Sharding] = [] if fsdp is None else [MegatronFsdp(fsdp)]
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        shardings.append(FullyShard(model))
    if any(map(is_sharded, model.modules())):
        shardings.append(MegatronFsdpV2(model))
    shardings += map(Unsharded, ddp)
    if len(shardings) > 1:
        names = " and ".join(sharding.name for sharding in shardings)
        raise HookError(
            f"{type(model).__name__} is wrapped by {names}, and each of them handles parameters in "
            "its own way. Wrap it in one way, or give graph_units the part that is."
        )
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise HookError(
                f"{type(model).__name__} is wrapped by FullyShardedDataParallel (FSDP1), which "
                "flattens parameters. Shard it with torch.distributed.fsdp.fully_shard instead."
            )
        if type(module).__name__ == "DistributedDataParallel" and module not in ddp:
            raise HookError(
                f"{type(model).__name__} is wrapped by DistributedDataParallel of "
                f"{type(module).__module__}, whose hooks are on gradient accumulators. A capture "
                "replaces these, and gradients would be lost. Wrap it by "
                "torch.nn.parallel.DistributedDataParallel or by Megatron-FSDP."
            )
    return shardings[0] if shardings else Unsharded(model)
