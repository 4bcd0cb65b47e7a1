"""Models whose parameters stay where they are: DistributedDataParallel, or no wrapper at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.fsdp.sharding import Sharding


class Unsharded(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`. All hooks are the user's.

    Args:
        wrapped: the ``DistributedDataParallel``, or the model.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        ddp = isinstance(wrapped, DistributedDataParallel)
        self.network = wrapped.get_submodule("module") if ddp else wrapped
        self.name = "DistributedDataParallel" if ddp else "no sharding"
        self._is_ddp = ddp

    def may_renew_accumulators(self, layers: Sequence[nn.Module]) -> bool:
        """See :class:`Sharding`: not if a wrapper has its hooks on them, in the module tree or not.

        Nothing tells whether an accumulator has hooks. So one that anybody holds is kept, such as
        the graph of an old loss.
        """
        return not self._is_ddp and not accumulators_are_held(layers)


def accumulators_are_held(modules: Iterable[nn.Module]) -> bool:
    """Whether anything but the next pass uses a parameter's AccumulateGrad node."""
    for parameter in {p: None for module in modules for p in module.parameters()}:
        if parameter.requires_grad and parameter.is_leaf:
            mark = object()
            _notes_of(parameter)["megatron_cg"] = mark
            # The node is new, and without the mark, if nobody else had it.
            if _notes_of(parameter).pop("megatron_cg", None) is mark:
                return True
    return False


def _notes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """The metadata of its AccumulateGrad node, which lives as long as the node."""
    node: Any = get_gradient_edge(parameter).node
    notes: dict[str, Any] = node.metadata
    return notes
