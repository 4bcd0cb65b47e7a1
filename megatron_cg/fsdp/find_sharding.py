"""Which sharding by Megatron-FSDP a model has, if it has one."""

from typing import Any

from torch import nn

from megatron_cg.extensions import sharding_by_v2
from megatron_cg.fsdp.megatron_fsdp import MegatronFsdp, find_megatron_fsdp
from megatron_cg.fsdp.roles import fsdp_package_of
from megatron_cg.fsdp.sharding import Sharding


def is_sharded(module: nn.Module) -> bool:
    """Whether Megatron-FSDP v2 shards this module by itself."""
    kinds: tuple[Any, ...] = type(module).__mro__
    return any(
        kind.__name__ == "FsdpModule" and fsdp_package_of(kind.__init__) is not None
        for kind in kinds
    )


def root_of(model: nn.Module) -> nn.Module | None:
    """The ``MegatronFSDP`` in a model, or the first module that its version 2 shards, or None.

    Raises UpstreamChangedError if the former lacks a member that we rely on.
    """
    return next(filter(is_sharded, model.modules()), None) or find_megatron_fsdp(model)


def of_megatron(model: nn.Module) -> Sharding | None:
    """The sharding of a model by Megatron-FSDP, of either version, or None; see :func:`root_of`.

    Raises ExtensionMissingError for version 2 without its extension.
    """
    root = root_of(model)
    if root is None:
        return None
    return sharding_by_v2(model) if is_sharded(root) else MegatronFsdp(root)
