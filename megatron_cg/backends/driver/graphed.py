"""The callables that a capture returns: a recorded forward and backward each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_cg.errors import MegatronCGError
from megatron_cg.replay.dtensors import laid_out
from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.upstream.patch import set_attribute

Tensors = tuple[torch.Tensor | None, ...]


class Recording:
    """One recorded forward or backward pass."""

    def replay(self) -> None:
        """Run the pass again, on the memory on which it was recorded."""
        raise NotImplementedError

    def finished(self, *, lends: bool) -> None:
        """The caller has taken the results of a replay.

        ``lends``: it reads gradients of weights in place until the next replay of any pass.
        """

    def reset(self) -> None:
        """Release the recording. Safe to call twice."""
        raise NotImplementedError


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
    forward: Recording | None = None
    backward: Recording | None = None
    outputs: Tensors = ()
    output_spec: TreeSpec = field(default_factory=lambda: tree_flatten(None)[1])
    grad_outputs: Tensors = ()
    grad_inputs: Tensors = ()
    layouts: dict[int, Any] = field(default_factory=dict)
    """For each of ``inputs`` that is a DTensor, by its id: how its gradient is laid out."""
    reached: dict[int, set[int]] = field(default_factory=dict)
    """For each output that needs a gradient, if there are several: the ids of ``inputs`` that it
    gives one to."""
    gradients_borrowed: bool = False
    """Whether gradients of parameters are returned in static memory, without a copy."""


class GraphResetError(MegatronCGError):
    """A graphed callable was used after its ``reset()``."""


class _Replay(torch.autograd.Function):
    """Autograd's view of a recorded callable: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, *inputs: torch.Tensor) -> Any:
        forward, _ = _live_passes(recorded)
        user = recorded.user_args
        _copy_together(zip(recorded.inputs[:user], inputs[:user], strict=True))
        forward.replay()
        forward.finished(lends=False)
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        return tuple(None if output is None else output.detach() for output in recorded.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        recorded: Recorded = ctx.recorded
        _, backward = _live_passes(recorded)
        pairs = [(s, g) for s, g in zip(recorded.grad_outputs, grads, strict=True) if s is not None]
        _copy_together((s, g) for s, g in pairs if g is not None)
        for static in (s for s, g in pairs if g is None):
            static.zero_()
        backward.replay()
        gradients = _reached(recorded, grads)
        clones = len(gradients) if recorded.gradients_borrowed else recorded.user_args
        returned = tuple(
            None if grad is None else grad.clone() if index >= clones else grad.detach()
            for index, grad in enumerate(gradients)
        )
        backward.finished(lends=recorded.gradients_borrowed)
        layouts = (recorded.layouts.get(id(one)) for one in recorded.inputs)
        return (None, *map(laid_out, returned, layouts))


def _copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each value into its static tensor, unless it is there, in one call a dtype.

    ``torch._foreach_copy_`` copies tensors of one dtype and device by one kernel, and others one by
    one (torch 2.11, ``ForeachUtils.h``, ``can_use_fast_route``). No value lies in the static memory
    of another one; see ``replay/guard.py``.
    """
    groups: dict[
        tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    for static, value in pairs:
        if not _lies_in(value, static):
            into, values = groups.setdefault((static.dtype, static.device), ([], []))
            into.append(static)
            # Another layout of the same memory cannot be copied onto itself.
            values.append(value.clone() if value.data_ptr() == static.data_ptr() else value)
    for into, values in groups.values():
        torch._foreach_copy_(into, values)


def _lies_in(value: torch.Tensor, static: torch.Tensor) -> bool:
    return (
        value.data_ptr() == static.data_ptr()
        and value.stride() == static.stride()
        and value.is_conj() == static.is_conj()
        and value.is_neg() == static.is_neg()
    )


def _reached(recorded: Recorded, grads: Sequence[torch.Tensor | None]) -> Tensors:
    """The gradients of inputs that an output with a gradient depends on; None for the others.

    See Note [Gradients of one output] in ``capture.py``.
    """
    if all(grads[number] is not None for number in recorded.reached):
        return recorded.grad_inputs
    used = (keys for number, keys in recorded.reached.items() if grads[number] is not None)
    reached = set().union(*used)
    pairs = zip(recorded.inputs, recorded.grad_inputs, strict=True)
    return tuple(grad if id(one) in reached else None for one, grad in pairs)


def _without_gradient(recorded: Recorded, inputs: Sequence[Any]) -> list[int]:
    """The outputs that depend on no input that needs a gradient now; all did at capture."""
    if not recorded.reached or all(
        value.requires_grad or not static.requires_grad
        for static, value in zip(recorded.inputs, inputs, strict=False)
    ):
        return []
    given = zip(recorded.inputs, (*inputs, *recorded.parameters), strict=True)
    needing = {id(static) for static, value in given if value.requires_grad}
    return [number for number, keys in recorded.reached.items() if keys.isdisjoint(needing)]


def _live_passes(recorded: Recorded) -> tuple[Recording, Recording]:
    if recorded.forward is None or recorded.backward is None:
        raise GraphResetError(
            f"{recorded.label}: this graphed callable has been reset and can no longer be used. "
            "Capture again."
        )
    return recorded.forward, recorded.backward


class GraphedModule:
    """A layer's recorded passes; called like the layer, with tensors as in its sample."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._function: Any = _Replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. Keywords that were not in the sample are ignored, as in TE.

        Raises GraphResetError after reset.
        """
        recorded = self._recorded
        _live_passes(recorded)
        flat, _ = tree_flatten((args, [kwargs[name] for name in recorded.kwarg_names]))
        outputs = list(self._function.apply(recorded, *flat, *recorded.parameters))
        for number in _without_gradient(recorded, flat):
            outputs[number] = outputs[number].detach()
        return tree_unflatten(outputs, recorded.output_spec)

    def replay_function(self) -> ReplayFunction:
        recorded = self._recorded
        return ReplayFunction(
            self._function,
            1 + recorded.user_args,
            replace=lambda function: set_attribute(self, "_function", function),
            borrow=lambda: set_attribute(recorded, "gradients_borrowed", True),
            needs=tuple(static is not None for static in recorded.grad_outputs),
        )

    def backward_dw(self) -> None:
        """Do nothing: the backward pass holds the weight gradients. Raises after reset."""
        _live_passes(self._recorded)

    def reset(self) -> None:
        """Release both passes; a later call or a pending backward then raises."""
        recorded = self._recorded
        passes = (recorded.forward, recorded.backward)
        recorded.forward = recorded.backward = None
        recorded.inputs = recorded.outputs = ()
        recorded.parameters = ()
        recorded.grad_outputs = recorded.grad_inputs = ()
        for one in passes:
            if one is not None:
                one.reset()
