"""How a model is sharded, and one that is not: leaves whose gradient accumulators must stay.

Note [DDP finds parameters by their accumulators]
    DistributedDataParallel keeps the accumulators that parameters have when it is created (torch
    2.11, ``reducer.cpp``), with hooks that count gradients. Other wrappers do the same, and may not
    be in the module tree. So while a module is captured or verified whose accumulators somebody
    holds, it holds other leaves of autograd: parameters on the same memory with accumulators of
    their own. Replays give gradients to the parameters.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.errors import CaptureError, HookError
from megatron_cg.fsdp.sharding import Sharding, shardings_of
from megatron_cg.replay.borders import spec_of
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.units.held import instances, nothing_frozen


class Unsharded(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`. All hooks are the user's.

    ``wrapped`` is the ``DistributedDataParallel``, or the model.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        self._is_ddp = isinstance(wrapped, DistributedDataParallel)
        self.network = wrapped.get_submodule("module") if self._is_ddp else wrapped
        self.name = "DistributedDataParallel" if self._is_ddp else "no sharding"

    def is_distributed(self, module: nn.Module) -> bool:
        """As after ``parallelize_module``, and in torchtitan's SimpleFSDP."""
        return any(map(spec_of, module.parameters()))

    def other_leaves(self, layers: Sequence[nn.Module]) -> "OtherLeaves | None":
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
        return sys.getrefcount(node) > _USERS or id(parameter) in self._in_wrappers

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


class OtherLeaves:
    """Other leaves for all trainable parameters below some modules; see the note above."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = {owner: None for module in modules for owner in module.modules()}
        self._places = [
            (owner, name, parameter)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._leaves = {parameter: _leaf(parameter) for _, _, parameter in self._places}
        self._parameters = {leaf: parameter for parameter, leaf in self._leaves.items()}
        self._held = False

    @contextmanager
    def held(self, *, captures: bool = True) -> Iterator[None]:
        """Modules hold the leaves inside the block.

        Raises CaptureError if it ``captures``, and a pass uses a parameter itself or moves a leaf.
        """
        with ExitStack() as undo:
            for owner, name, parameter in self._places:
                if owner._parameters.get(name) is not parameter:
                    continue  # Replaced since, and not the graph's.
                undo.callback(setattr, owner, name, parameter)
                setattr(owner, name, self._leaves[parameter])
                if captures:
                    refuse = partial(_used_itself, f"{type(owner).__name__}.{name}")
                    undo.callback(parameter.register_hook(refuse).remove)
            self._held = True
            undo.callback(setattr, self, "_held", False)
            yield
            for owner, name, parameter in self._places if captures else ():
                if self._leaves[parameter].data_ptr() != parameter.data_ptr():
                    raise CaptureError(
                        f"{type(owner).__name__} moves {name} to other memory in its forward pass, "
                        "so a graph of it under DistributedDataParallel would not see what the "
                        "optimizer changes. Leave the unit out of graph_units."
                    )

    def replays(self, replay: ReplayFunction) -> Callable[[], None]:
        """Make a graph give its gradients to leaves while they are held, else to parameters.

        Returns the undo.
        """
        function, first = replay.function, replay.first_weight

        def apply(*args: Any) -> Any:
            places = self._leaves if self._held else self._parameters
            return function.apply(*args[:first], *(places.get(one, one) for one in args[first:]))

        ours = SimpleNamespace(apply=apply, forward=function.forward, backward=function.backward)
        return replay.replace(ours)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    kind, data = type(parameter), parameter.detach()
    # As Parameter makes itself. A forward pass may ask for the class.
    is_own = issubclass(kind, nn.Parameter)
    made: Any = torch.Tensor._make_subclass(kind, data, True) if is_own else nn.Parameter(data)
    vars(made).update(vars(parameter))
    return made  # type: ignore[no-any-return]


def _used_itself(label: str, _gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"{label} is used through another reference than the attribute of its module, so its "
        "gradient cannot be captured under DistributedDataParallel. Use the attribute in forward, "
        "or leave the unit out of graph_units."
    )


def find_sharding(model: nn.Module) -> Sharding:
    """The sharding of ``model``: of the model itself, or of a module in it.

    Raises HookError for one that is not known, or several; and as :func:`shardings_of`.
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
