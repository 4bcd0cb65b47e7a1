"""Gradient accumulators that a capture may use: new ones, or those of other leaves.

Note [An old graph of autograd keeps its streams]
    A parameter keeps its AccumulateGrad node as long as anything refers to the node. The node
    belongs to the stream on which it was created. If a training loop still holds the last step's
    loss, it also holds that step's autograd graph, with nodes of the normal stream. A backward pass
    under capture then makes that stream wait, and the capture fails: "operation would make the
    legacy stream depend on a capturing blocking stream" (torch 2.11). A node that is created inside
    the capture belongs to the capture stream. torch creates a new node after a parameter's data has
    had another dtype (``VariableHooks::set_data``: "resets gradient accumulator if metadata is out
    of date").

Note [DDP finds parameters by their accumulators]
    DistributedDataParallel registers its hooks on the accumulators that parameters have when it is
    created (torch 2.11, ``reducer.cpp``), and keeps these accumulators. They belong to the stream
    of that moment, and their hooks count gradients. So while a module of it is captured or
    verified, it holds other leaves of autograd: parameters on the same memory with accumulators of
    their own. Replays give their gradients to the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.replay_function import ReplayFunction


def forget_accumulators(modules: Iterable[nn.Module]) -> None:
    """Make the next pass create new AccumulateGrad nodes; see the first note above.

    Parameters keep their data, gradients and hooks. Quantized parameters are skipped.

    Args:
        modules: the modules with the parameters, which include those of submodules.
    """
    for parameter in {p: None for module in modules for p in module.parameters()}:
        data = parameter.data
        if type(data) is torch.Tensor:
            other = torch.float64 if data.dtype == torch.float32 else torch.float32
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data


class OtherLeaves:
    """Other leaves for the trainable parameters of some modules; see the second note above.

    Args:
        modules: the modules with the parameters, which include those of submodules.
    """

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
    def held(self) -> Iterator[None]:
        """Modules hold the leaves inside the block.

        Raises CaptureError if a backward pass in the block reached a parameter itself.
        """
        missed: list[str] = []
        with ExitStack() as undo:
            for owner, name, parameter in self._places:
                undo.callback(setattr, owner, name, parameter)
                setattr(owner, name, self._leaves[parameter])
                label = f"{type(owner).__name__}.{name}"
                handle = parameter.register_hook(lambda _grad, label=label: missed.append(label))
                undo.callback(handle.remove)
            self._held = True
            undo.callback(setattr, self, "_held", False)
            yield
        if missed:
            raise CaptureError(
                f"{missed[0]} is used through another reference than the attribute of its module, "
                "so its gradient cannot be captured under DistributedDataParallel. Use the "
                "attribute in forward, or leave the unit out of graph_units."
            )

    def replays(self, replay: ReplayFunction) -> None:
        """Make a graph captured in :meth:`held` give its gradients to the parameters."""
        replay.replace(_OnParameters(self, replay))

    def weights(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """What replays take for these leaves."""
        return leaves if self._held else tuple(self._parameters.get(w, w) for w in leaves)


class _OnParameters:
    """Called instead of a graph's autograd function."""

    def __init__(self, leaves: OtherLeaves, replay: ReplayFunction) -> None:
        self._leaves, self._first = leaves, replay.first_weight
        self._function = replay.function
        self.forward, self.backward = self._function.forward, self._function.backward

    def apply(self, *args: Any) -> Any:
        """Do what the function's own ``apply`` does."""
        weights = self._leaves.weights(args[self._first :])
        return self._function.apply(*args[: self._first], *weights)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach())
    vars(made).update(vars(parameter))
    return made
