"""Gradient accumulators that a capture may use: new ones, or those of other leaves.

Note [An old graph of autograd keeps its streams]
    A parameter keeps its AccumulateGrad node as long as anything refers to the node. The node
    belongs to the stream on which it was created. If a training loop still holds the last step's
    loss, it also holds that step's autograd graph, with nodes of the normal stream. A backward pass
    under capture then makes that stream wait, and the capture fails: "operation would make the
    legacy stream depend on a capturing blocking stream" (torch 2.11; autograd's own error from 2.13
    on). A node that is created inside the capture belongs to the capture stream. torch creates a
    new node after a parameter's data has had another dtype (``VariableHooks::set_data``: "resets
    gradient accumulator if metadata is out of date").

Note [A captured graph of autograd keeps its stream]
    Nodes of the capture must not outlive it either. Megatron's layers keep tensors of their last
    forward pass (megatron-core 0.19.2: ``probs`` of the token dispatcher, the residual in
    ``FineGrainedActivationOffloadingInterface``), and these keep the nodes of weights in front of
    them. In a replay, such a weight's gradient is stored, and its hook runs, on the capture stream.
    Whoever reduces gradients waits only for the stream of the last hook. With ZeRO-2 and an MoE
    layer captured up to its router, that is the embedding's, on the normal stream: the bucket was
    reduced while the gradients of the first layer were still being copied into it, and some were
    NaN. So nodes are forgotten after a capture as well.

Note [DDP finds parameters by their accumulators]
    DistributedDataParallel registers its hooks on the accumulators that parameters have when it is
    created (torch 2.11, ``reducer.cpp``), and keeps these accumulators. They belong to the stream
    of that moment, and their hooks count gradients. Other wrappers do the same and may not even be
    in the module tree. So while a module of a model that is not sharded is captured or verified,
    and somebody holds its accumulators, it holds other leaves of autograd: parameters on the same
    memory with accumulators of their own. Replays give gradients to the parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.dtensors import laid_out, spec_of
from megatron_cg.replay.unit import ReplayFunction

_DATA: Any = torch.Tensor.data


def forget_accumulators(modules: Iterable[nn.Module]) -> None:
    """Make the next pass create new AccumulateGrad nodes; see the first two notes above.

    ``modules`` stand for all parameters below them, which keep their data, gradients and hooks.
    Hooks on the nodes themselves are lost.
    """
    for parameter in {p: None for module in modules for p in module.parameters()}:
        # torch's own property: Transformer Engine's quantized tensors have one of their own.
        data = _DATA.__get__(parameter)
        other = torch.float64 if data.dtype == torch.float32 else torch.float32
        empty = torch.empty(0, dtype=other, device=data.device)
        _DATA.__set__(parameter, laid_out(empty, spec_of(parameter)))
        _DATA.__set__(parameter, data)


class OtherLeaves:
    """Other leaves for all trainable parameters below some modules; see the last note above."""

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

        on_these = SimpleNamespace(
            apply=apply, forward=function.forward, backward=function.backward
        )
        return replay.replace(on_these)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    made: Any = nn.Parameter(parameter.detach())
    kind = type(parameter)
    if type(made) is not kind and issubclass(kind, nn.Parameter):
        # As Parameter makes itself. A forward pass may ask for the class.
        made = torch.Tensor._make_subclass(kind, parameter.detach(), True)
    vars(made).update(vars(parameter))
    leaf: nn.Parameter = made
    return leaf


def _used_itself(label: str, _gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"{label} is used through another reference than the attribute of its module, so its "
        "gradient cannot be captured under DistributedDataParallel. Use the attribute in forward, "
        "or leave the unit out of graph_units."
    )
