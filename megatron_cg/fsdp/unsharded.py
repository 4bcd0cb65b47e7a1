"""Models whose parameters stay where they are: DistributedDataParallel, or no wrapper at all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.upstream.patch import instances, nothing_frozen


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

    def may_renew_accumulators(self, layers: Sequence[nn.Module]) -> bool:
        """See :class:`Sharding`: not if a wrapper has its hooks on them, in the module tree or not.

        Nothing tells whether an accumulator has hooks. But those of one that only graphs of
        autograd hold, such as that of an old loss, end with these graphs.
        """
        trained = {p: None for module in layers for p in module.parameters() if p.requires_grad}
        return not self._is_ddp and not any(self._may_have_hooks(p) for p in trained if p.is_leaf)

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
