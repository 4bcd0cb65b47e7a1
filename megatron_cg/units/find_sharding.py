"""How a model is sharded, if it is: by which of the ways, or its parameters stay where they are."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.errors import HookError
from megatron_cg.fsdp.megatron_fsdp import shardings_of
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.units.unsharded import Unsharded


def find_sharding(model: nn.Module) -> Sharding:
    """The sharding of ``model``: of the model itself, or of a module in it.

    Raises:
        HookError: the model is sharded in more than one way, by torch's FSDP1, or by Megatron's
            DistributedDataParallel.
        ExtensionMissingError: ``fully_shard`` shards it, without the extension for that.
        UpstreamChangedError: the sharding lacks a member that we rely on.
    """
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    shardings = [*shardings_of(model), *map(Unsharded, ddp)]
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
