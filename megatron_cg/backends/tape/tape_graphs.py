"""The callables that the tape backend returns: a recorded forward and backward each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_cg.backends.tape.tape_recording import Tape
from megatron_cg.errors import MegatronCGError
from megatron_cg.replay.replay_function import ReplayFunction
from megatron_cg.upstream.patch import set_attribute

Tensors = tuple[torch.Tensor | None, ...]


class GraphResetError(MegatronCGError):
    """A graphed callable was used after its ``reset()``."""


class StaleReplayError(MegatronCGError):
    """A backward replay needs activations that a later forward replay has overwritten."""


@dataclass
class Recorded:
    """All that capture records for one sample of one callable.

    ``inputs`` is the static input surface: the flattened sample arguments, the keyword samples
    in the order of ``kwarg_names``, then the module's parameters that receive a gradient.
    ``outputs``, ``grad_outputs`` and ``grad_inputs`` are flat and are in static memory.
    """

    module: nn.Module
    label: str
    user_args: int
    kwarg_names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    forward: Tape | None = None
    backward: Tape | None = None
    outputs: Tensors = ()
    output_spec: TreeSpec = field(default_factory=lambda: tree_flatten(None)[1])
    grad_outputs: Tensors = ()
    grad_inputs: Tensors = ()
    #: Storages that must not be used after this callable's forward, or after its backward.
    dead_after_forward: frozenset[int] = frozenset()
    dead_after_backward: frozenset[int] = frozenset()
    #: Storages of other callables that this backward may overwrite.
    dead_before_backward: frozenset[int] = frozenset()
    replays: int = 0
    gradients_borrowed: bool = False
    """Whether gradients of parameters are returned in static memory, without a copy."""


class _Replay(torch.autograd.Function):
    """Autograd's view of a recorded callable: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, *inputs: torch.Tensor) -> Any:
        for index in range(recorded.user_args):
            static = recorded.inputs[index]
            if static.data_ptr() != inputs[index].data_ptr():
                static.copy_(inputs[index])
        tape, _ = _live_tapes(recorded)
        tape.replay()
        tape.pool.poison(recorded.dead_after_forward)
        recorded.replays += 1
        ctx.recorded, ctx.replay = recorded, recorded.replays
        return tuple(None if output is None else output.detach() for output in recorded.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        recorded: Recorded = ctx.recorded
        _, tape = _live_tapes(recorded)
        if ctx.replay != recorded.replays:
            raise StaleReplayError(
                f"{recorded.label}: its forward was replayed again before this backward, so the "
                "activations it needs are overwritten. Run the backward first, or capture one "
                "graph a microbatch in flight."
            )
        for static, grad in zip(recorded.grad_outputs, grads, strict=True):
            if static is not None and grad is not None and static.data_ptr() != grad.data_ptr():
                static.copy_(grad)
        tape.pool.poison(recorded.dead_before_backward)
        tape.replay()
        clones = len(recorded.grad_inputs) if recorded.gradients_borrowed else recorded.user_args
        returned = tuple(
            None if grad is None else grad.clone() if index >= clones else grad.detach()
            for index, grad in enumerate(recorded.grad_inputs)
        )
        borrowed = storage_keys(recorded.grad_inputs[recorded.user_args : clones])
        tape.pool.poison(recorded.dead_after_backward - borrowed)
        tape.pool.poison_before_next_replay(recorded.dead_after_backward & borrowed)
        return (None, *returned)


def storage_keys(tensors: Tensors) -> set[int]:
    """The keys of the storages of these tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


def _live_tapes(recorded: Recorded) -> tuple[Tape, Tape]:
    if recorded.forward is None or recorded.backward is None:
        raise GraphResetError(
            f"{recorded.label}: this graphed callable has been reset and can no longer be used. "
            "Capture again."
        )
    return recorded.forward, recorded.backward


class TapeCallable:
    """A layer's recorded passes; called like the layer, with tensors.

    Keyword arguments that were not in the samples are ignored, as in TE. If the module is not in
    the training state of the capture, its own forward runs.
    """

    def __init__(self, recorded: Recorded, forward: Callable[..., Any]) -> None:
        self._recorded = recorded
        self._eager = forward
        self._training = recorded.module.training
        self._function: Any = _Replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. Raises GraphResetError after reset and TypeError if an argument is missing."""
        recorded = self._recorded
        _live_tapes(recorded)
        if recorded.module.training != self._training:
            return self._eager(*args, **kwargs)
        missing = [name for name in recorded.kwarg_names if name not in kwargs]
        if missing:
            raise TypeError(
                f"{recorded.label} was captured with keyword {missing[0]}, which this call lacks"
            )
        flat, _ = tree_flatten((args, [kwargs[name] for name in recorded.kwarg_names]))
        self._check(flat)
        outputs = self._function.apply(recorded, *flat, *recorded.parameters)
        return tree_unflatten(list(outputs), recorded.output_spec)

    def _check(self, flat: Sequence[Any]) -> None:
        expected = self._recorded.inputs[: self._recorded.user_args]
        found = [getattr(value, "shape", type(value).__name__) for value in flat]
        if found != [value.shape for value in expected]:
            raise TypeError(
                f"{self._recorded.label} was captured for inputs of shapes "
                f"{[tuple(value.shape) for value in expected]} and is called with {found}"
            )

    def replay_function(self) -> ReplayFunction:
        """See :meth:`megatron_cg.backends.base.Backend.replay_function`."""
        recorded = self._recorded
        return ReplayFunction(
            self._function,
            1 + recorded.user_args,
            replace=lambda function: set_attribute(self, "_function", function),
            borrow=lambda: set_attribute(recorded, "gradients_borrowed", True),
        )

    def backward_dw(self) -> None:
        """Do nothing: the tape's backward holds the weight gradients. Raises after reset."""
        _live_tapes(self._recorded)

    def reset(self) -> None:
        """Release the tapes; a later call or a pending backward then raises."""
        recorded = self._recorded
        recorded.forward = recorded.backward = None
        recorded.inputs = recorded.outputs = ()
        recorded.parameters = ()
        recorded.grad_outputs = recorded.grad_inputs = ()
