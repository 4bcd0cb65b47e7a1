"""DTensors at the border of a graph: weights, arguments, results, and the gradients of all three.

A graph holds addresses. So it takes and returns what this rank has of a DTensor, its local tensor,
and inside of a capture the unit gets DTensors around those. How the DTensor was laid out (mesh,
placements, global shape) is a part of the call's form.

Note [How a gradient is laid out]
    The operations of a pass decide that: the gradient of a replicated tensor may be replicated, or
    partial sums that the next operation reduces. ``DTensor.from_local`` and ``to_local`` convert it
    to what their caller guesses, so a sum would be rounded in another place. Here nothing is
    converted. Gradients of weights and arguments are laid out as in the capture, which runs the
    unit's own code; those of results must come as in the steps before it.

Relied on: torch 2.11, ``DTensor(local, spec, requires_grad=...)``, ``DeviceMesh._rank_map``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron_cg.errors import CaptureError
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.own_gradients import PassedOn, same_memory
from megatron_cg.upstream.symbols import Symbol

_PARTS = ("_local_tensor", "_spec")
_PATH = "torch.distributed.tensor:DTensor"
RELIES_ON = (Symbol(_PATH, "a local tensor and its layout", attributes=_PARTS),)
_CAUSE = (
    "A graph computes with the layout of its capture. Redistribute what the unit returns to one "
    "layout in all passes, or leave the unit out of units."
)


def local(tensor: Any) -> Any:
    """What this rank has of a DTensor, once it is there; anything else itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def spec_of(tensor: Any) -> Any:
    return tensor._spec if isinstance(tensor, DTensor) else None


def laid_out(tensor: Any, spec: Any) -> Any:
    """A DTensor of this local tensor, or the tensor itself if ``spec`` is None."""
    if spec is None or tensor is None:
        return tensor
    make: Any = DTensor
    return make(tensor, copy.copy(spec), requires_grad=tensor.requires_grad)


def is_awaited(value: Any) -> bool:
    """Whether it is the result of a collective that is not waited for yet."""
    return isinstance(value, AsyncCollectiveTensor)


def there(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what it stands for, once it is there."""
    return _opened(tensor, None) if is_awaited(tensor) else tensor


def same_placements(*specs: Any) -> bool:
    """Whether two tensors with these specs are laid out alike."""
    one, two = (spec and (spec.mesh, spec.placements) for spec in specs)
    return bool(one == two)


def exchanges(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of ``parallelize_module``, and so a part of what the module computes."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor.")


def ranks_of_meshes(module: nn.Module) -> set[int]:
    """The keys of the host's memory with the ranks of meshes, which code in a pass may slice."""
    specs = {spec_of(tensor) for tensor in (*module.parameters(), *module.buffers())} - {None}
    tensors = (getattr(spec.mesh, "_rank_map", spec.mesh.mesh) for spec in specs)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


class Layout:
    """How one argument or result of a unit is laid out, and its gradient.

    ``name`` is for messages. See Note [How a gradient is laid out].
    """

    def __init__(self, tensor: torch.Tensor, name: str, gradient: Any = None) -> None:
        self.spec, self._name = spec_of(tensor), name
        self.gradient = gradient
        """The spec of its gradient; None until one came."""
        self.varies: Mismatch | None = None
        """What gradients came, if not all were laid out alike."""
        self.refuse: Callable[[Mismatch], object] = _refuse
        """Called with that."""
        self._shape = tensor._local_tensor.shape  # type: ignore[attr-defined]
        self._last: tuple[ReferenceType[torch.Tensor], ReferenceType[torch.Tensor]] | None = None

    @classmethod
    def of_result(cls, tensor: torch.Tensor, number: int, seen: Layout | None) -> Layout:
        """The layout of an output of the graph, whose gradient comes as in the steps ``seen``.

        If none came, as the functions of DTensor give it: not partial.
        """
        made = cls(tensor, f"result {number}", seen and seen.gradient)
        if made.gradient is None:
            made.gradient = copy.copy(made.spec)
            whole = (Replicate() if isinstance(p, Partial) else p for p in made.spec.placements)
            made.gradient.placements = tuple(whole)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        placements, shape = self.spec.placements, tuple(self.spec.shape)
        return f"a DTensor of shape {shape} with placements {placements}"

    def is_like(self, value: Any) -> bool:
        """Whether ``value`` is a DTensor that is laid out so."""
        return type(value) is DTensor and (value._spec is self.spec or value._spec == self.spec)

    def opened(self, tensor: torch.Tensor) -> torch.Tensor:
        """The local tensor of a DTensor, on the same memory."""
        made: torch.Tensor = _opened(tensor, self) if tensor.requires_grad else local(tensor)
        self._last = ref(made), ref(tensor)
        return made

    def closed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The DTensor of a local tensor; the same one, if it was just opened."""
        if self._last is not None and self._last[0]() is tensor:
            same = self._last[1]()
            if same is not None:
                return same
        if tensor.requires_grad:
            return _closed(tensor, self)  # type: ignore[no-any-return]
        made: torch.Tensor = laid_out(tensor, self.spec)
        self._last = ref(tensor), ref(made)
        return made

    def note(self, gradient: torch.Tensor | None) -> None:
        """A gradient came, or none. Calls ``refuse`` if its layout is not that of the one before.

        Or if its local tensor has another shape than that of the value, which autograd forbids.
        """
        if gradient is None:
            return
        before, now = self.gradient or self.spec, spec_of(gradient)
        self.gradient = self.gradient or now
        if same_placements(self.gradient, now) and local(gradient).shape == self._shape:
            return
        was, is_now = (str(one and one.placements) for one in (before, now))
        subject = f"the layout of the gradient of {self._name}"
        self.varies = Mismatch("layout", subject, was, is_now, _CAUSE)
        self.refuse(self.varies)


def _refuse(mismatch: Mismatch) -> NoReturn:
    raise CaptureError(mismatch.text("a unit"))


class _Opened(PassedOn):
    """The tensor inside of another, whose gradient gets the layout that was noted."""


def _opened(tensor: torch.Tensor, layout: Layout | None) -> Any:
    copies = tensor.retains_grad or bool(tensor._backward_hooks)

    def give(gradient: torch.Tensor) -> Any:
        gradient = gradient.clone() if copies else gradient  # See own_gradients.py.
        return laid_out(gradient, layout and (layout.gradient or layout.spec))

    apply: Any = _Opened.apply
    return apply(tensor, lambda outer: same_memory(local(outer)), give)


class _Closed(PassedOn):
    """A DTensor around a local tensor, whose gradient's layout is noted."""


def _closed(tensor: torch.Tensor, layout: Layout) -> Any:
    def give(gradient: torch.Tensor) -> Any:
        layout.note(gradient)
        return local(gradient)

    apply: Any = _Closed.apply
    return apply(tensor, lambda inner: laid_out(same_memory(inner), layout.spec), give)
