"""How a model is sharded, if it is: by which of the ways, or its parameters stay where they are."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.errors import HookError
from megatron_cg.extensions import sharding_by_fsdp2, sharding_by_v2
from megatron_cg.fsdp.find_sharding import is_sharded
from megatron_cg.fsdp.megatron_fsdp import MegatronFsdp, find_megatron_fsdp
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.borders import spec_of
from megatron_cg.units.other_leaves import OtherLeaves
from megatron_cg.upstream.patch import instances, nothing_frozen


def find_sharding(model: nn.Module) -> Sharding:
    """The sharding of ``model``: of the model itself, or of a module in it.

    Raises:
        HookError: the model is sharded in more than one way, by torch's FSDP1, or by Megatron's
            DistributedDataParallel.
        ExtensionMissingError: ``fully_shard`` shards it, without the extension for that.
        UpstreamChangedError: the sharding lacks a member that we rely on.
    """
    fsdp = find_megatron_fsdp(model)
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    shardings: list[Sharding] = [] if fsdp is None else [MegatronFsdp(fsdp)]
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        shardings.append(sharding_by_fsdp2(model))
    if any(map(is_sharded, model.modules())):
        shardings.append(sharding_by_v2(model))
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


class Unsharded(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`. All hooks are the user's.

    ``wrapped`` is the ``DistributedDataParallel``, or the model.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        ddp = isinstance(wrapped, DistributedDataParallel)
        self.network = wrapped.get_submodule("module") if ddp else wrapped
        self.name = "DistributedDataParallel" if ddp else "no sharding"
        self._is_ddp = ddp

    def is_distributed(self, module: nn.Module) -> bool:
        """As after ``parallelize_module``, and in torchtitan's SimpleFSDP."""
        return any(map(spec_of, module.parameters()))

    def other_leaves(self, layers: Sequence[nn.Module]) -> OtherLeaves | None:
        """See :class:`Sharding`: if a wrapper has its hooks on them, in the module tree or not.

        Nothing tells whether an accumulator has hooks. But those of one that only graphs of
        autograd hold, such as that of an old loss, end with these graphs.
        """
        trained = {p: None for module in layers for p in module.parameters() if p.requires_grad}
        if self._is_ddp or any(self._may_have_hooks(p) for p in trained if p.is_leaf):
            return OtherLeaves(layers)
        return None

    def _may_have_hooks(self, parameter: nn.Parameter) -> bool:
        mark = object()
        _node_of(parameter).metadata["megatron_cg"] = mark
        node = _node_of(parameter)
        if node.metadata.pop("megatron_cg", None) is not mark:
            return False  # It is new, since nobody else had it.
        in_python = sys.getrefcount(node) > _USERS
        return in_python or id(parameter) in self._in_wrappers

    @cached_property
    def _in_wrappers(self) -> frozenset[int]:
        """The ids of the parameters of all DistributedDataParallel, which hold nodes in C++."""
        with nothing_frozen():
            wrappers = instances(DistributedDataParallel)
        return frozenset(id(p) for wrapper in wrappers for p in wrapper.parameters())


_USERS = sys.getrefcount(object()) + 1
"""How many references a local variable has that is asked."""


def _node_of(parameter: nn.Parameter) -> Any:
    """Its AccumulateGrad node; Python has one object for it as long as anybody holds that."""
    return get_gradient_edge(parameter).node
