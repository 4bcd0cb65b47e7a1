"""Which sharding by Megatron-FSDP a model has, if it has one."""

from torch import nn

from megatron_cg.fsdp.megatron_fsdp import MegatronFsdp, find_megatron_fsdp
from megatron_cg.fsdp.megatron_fsdp_v2 import MegatronFsdpV2, is_sharded


def root_of(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` in a model, or the first module that its version 2 shards, or None.

    Raises UpstreamChangedError if the former lacks a member that we rely on.
    """
    return next(filter(is_sharded, model.modules()), None) or find_megatron_fsdp(model)


def of_megatron(model: nn.Module) -> MegatronFsdp | MegatronFsdpV2 | None:
    """The sharding of a model by Megatron-FSDP, of either version, or None; see :func:`root_of`."""
    root = root_of(model)
    if root is None:
        return None
    return MegatronFsdpV2(model) if is_sharded(root) else MegatronFsdp(root)
