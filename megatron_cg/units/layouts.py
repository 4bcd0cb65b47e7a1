"""How arguments, results and their gradients are laid out, and how results are used outside.

A graph holds addresses. So it takes and returns what this rank has of a DTensor, its local tensor,
and inside of a capture the unit gets DTensors around those. How the DTensor was laid out (mesh,
placements, global shape) is a part of the call's form.

Note [How a gradient is laid out]
    The gradient of a replicated tensor may be replicated, or partial sums that the next operation
    reduces. ``DTensor.from_local`` and ``to_local`` convert it to what their caller guesses, so a
    sum would be rounded in another place. Here nothing is converted: a gradient is laid out as its
    tensor is (replicated, if that is a partial sum), or the unit is refused.

Note [Strides of gradients]
    Kernels that add go through memory in its own order, so the strides of a gradient decide the
    last bits of sums over it, such as the gradient of a bias from ``y.sum()``, one number that is
    expanded. A graph reads gradients of its results with the strides of these, and autograd gives
    the gradient of an argument those of the argument. So gradients are laid out again: inside of
    the graph those of results, as they came in the steps before, and behind it those of arguments,
    as the unit's own code made them.

Relied on: torch 2.11, the hooks of a leaf see its gradient before ``AccumulateGrad`` copies it to
the strides of the leaf (``accumulate_grad.h``, ``clone_obey_contract``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from megatron_cg.backends.driver import is_dense
from megatron_cg.capture.observer import version_of
from megatron_cg.errors import CaptureError
from megatron_cg.replay.borders import (
    in_backward_pass,
    laid_out,
    local,
    pass_on,
    same_memory,
    same_placements,
    spec_of,
)
from megatron_cg.replay.guard import Mismatch
from megatron_cg.upstream.patch import Undo

Strides = tuple[int, ...]
Note = Callable[[torch.Tensor | None], None]
READ = (
    "a result that it also uses itself, whose gradient is read or hooked outside",
    "read the gradient of a view that the loss uses instead (y = y.view_as(y) outside of the unit)",
)
WRITTEN = (
    "a result that is a view of a tensor that it also uses itself, or of a part of one, and that "
    "is written outside",
    "write into a copy (y = y.clone() outside of the unit)",
)
_CAUSE = (
    "A graph computes with the layout of its capture, and sums over another one round otherwise. "
    "Use what the unit returns in the same way in each step, redistribute a DTensor to one layout, "
    "or leave the unit out of units."
)


def strides_of(tensor: torch.Tensor) -> Strides:
    """Its strides; 0 for a dimension of one element, or of elements that share memory."""
    if tensor.dim() in (4, 5):  # Kernels of images choose a memory format by these strides, too.
        return tensor.stride()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in pairs)


def _alike(tensor: torch.Tensor, strides: Strides) -> bool:
    """Whether it has these strides, but for dimensions of one element: those a graph gives it."""
    both = zip(strides_of(tensor), strides, tensor.shape, strict=True)
    return all(now == was or size <= 1 for now, was, size in both)


def _compact_strides(tensor: torch.Tensor) -> Strides | None:
    """Its strides if its elements fill their memory, so that a new tensor like it has them."""
    step, strides = 1, strides_of(tensor)
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1 and stride != step:
            return None
        step *= size
    return strides


class GradStrides:
    """The strides of the gradient of one result, in the passes of a step."""

    def __init__(self, name: str) -> None:
        self._name = name
        """For messages."""
        self._last: tuple[torch.Size, Strides] | None = None
        self.varies: Mismatch | None = None
        """What gradients came, if those of one shape were not alike."""
        self.layout: Layout | None = None
        """Of the result, if it is a DTensor."""
        self.inside: GradStrides | None = None
        """The same with uses inside of the unit, if it has any. Their strides count for a result
        that no gradient comes for: a graph adds zeros, and that sum shall have them."""

    def begin(self, tensor: torch.Tensor, *, is_used: bool) -> None:
        """Another pass has returned it; ``is_used``: and uses it itself."""
        if spec_of(tensor) is not None:
            self.layout = Layout(tensor, self._name)
        if is_used and self.inside is None:
            self.inside = GradStrides(self._name)

    def note(self, gradient: torch.Tensor | None) -> None:
        """A gradient came; None stands for zeros, of which nothing depends on strides."""
        if gradient is None:
            return
        if self.layout is not None:
            self.varies = self.layout.broken(gradient) or self.varies
        own = local(gradient)
        before, now = self._last, (own.shape, strides_of(own))
        if before is not None and before[0] == now[0] and not _alike(own, before[1]):
            self.varies = _mismatch(self._name, f"strides {before[1]}", f"strides {now[1]}")
        self._last = now

    def of(self, tensor: torch.Tensor) -> Strides | None:
        """The strides of the gradient of such a result; None if none came."""
        last = self._last or (self.inside and self.inside._last)
        return last[1] if last and last[0] == tensor.shape else None


class ReadOnly:
    """A result or an argument of a replay that nobody may write into."""

    found = WRITTEN

    def __init__(self, tensor: torch.Tensor, *, shares: bool) -> None:
        self.shares = shares
        """Whether an argument or another result has its memory, until the step is over."""
        # They count the writes of the tensor, which may be gone before the backward pass, and have
        # no memory. A write into a DTensor is one into it alone, or into its local tensor alone.
        self._aliases: list[Any] = [tensor.detach()]
        if spec_of(tensor) is not None:
            own: Any = tensor._local_tensor  # type: ignore[attr-defined]
            self._aliases[0]._local_tensor = own.new_empty(0)
            self._aliases.append(own.detach())
        self._aliases[-1].data = self._aliases[-1].new_empty(0)
        self.begin()

    def begin(self) -> None:
        """Writes count from now on."""
        self._versions = [*map(version_of, self._aliases)]

    def is_found(self) -> bool:
        """Whether it was written into."""
        return [*map(version_of, self._aliases)] != self._versions


class UsedResult:
    """A result that a unit uses itself, whose gradient may be read outside."""

    found, shares = READ, False

    def __init__(self, tensor: torch.Tensor) -> None:
        # No node: whether one lives says whether a pass still waits for its backward.
        self._tensor = ref(tensor)
        tensor.register_hook(lambda _: None).remove()
        self._hooks: Mapping[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
        """Those of its value now; torch gives a tensor that autograd writes to new ones."""
        self._own = set(self._hooks)

    def is_found(self) -> bool:
        """Whether the gradient is read or hooked outside."""
        tensor = self._tensor()
        if tensor is not None and tensor._backward_hooks is self._hooks and tensor.retains_grad:
            return True
        # FSDP2 has hooks on all that its modules return, and reads no gradient there.
        hooks = [hook for key, hook in self._hooks.items() if key not in self._own]
        return any("torch.distributed" not in str(hook) for hook in hooks)


class ObservedResult(UsedResult):
    """And its gradient from uses outside, in the steps before capture."""

    def __init__(self, unit: str, tensor: torch.Tensor, note: Note, last: int) -> None:
        super().__init__(tensor)
        self.unit, self._note, self._last = unit, note, last
        self._sum: tuple[torch.Tensor, Any] | None = None
        """Like the gradient so far, without memory, and its spec."""

    @property
    def is_alive(self) -> bool:
        return self._tensor() is not None

    def observe(self, edge: tuple[Any, int], users: Iterable[Any]) -> Iterator[Undo]:
        """Add up what uses outside of the unit pass on, until this is undone."""
        if not in_backward_pass():
            self._sum = None  # A pass may have ended before it came to this result.
        for node in {node for node in users if node._sequence_nr() >= self._last}:
            numbers = [i for i, one in enumerate(node.next_functions) if one == edge]

            def add(gradients: Sequence[Any], _: Any, numbers: Sequence[int] = numbers) -> None:
                for number in numbers:
                    self.add(gradients[number])

            yield node.register_hook(add).remove

    def add(self, gradient: torch.Tensor | None) -> None:
        """Add a gradient in the order of autograd, as far as its layout goes."""
        if gradient is None:
            return
        own, spec = local(gradient), spec_of(gradient)
        like = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        if self._sum is not None and same_placements(spec, self._sum[1]):
            like = self._sum[0] + like
        elif self._sum is not None:  # Autograd converts one of them: it varies.
            self.end()
        self._sum = like, spec

    def end(self, _: object = None) -> None:
        """The sum is complete."""
        made = None if self._sum is None else laid_out(*self._sum)
        self._sum = None
        self._note(made)


class Gradients:
    """The gradients of a unit's results and arguments, as its graph has them."""

    def __init__(self) -> None:
        self._results: dict[int, Strides] = {}
        """By the number of the graph's output."""
        self._arguments: dict[int, Strides] = {}
        """By position, of those that autograd would give other strides."""

    def result(self, number: int, tensor: torch.Tensor, seen: GradStrides | None) -> torch.Tensor:
        """An output of the graph, whose gradient is laid out as ``seen``."""
        own = _compact_strides(tensor)
        strides = (seen and seen.of(tensor)) or own
        if strides is None or not tensor.requires_grad:
            return tensor
        self._results[number] = strides
        return tensor if strides == own else _laid_out(tensor, strides)

    def note_arguments(self, samples: Sequence[torch.Tensor]) -> Iterator[Undo]:
        """Note the gradients of these samples in each backward pass, until all is undone."""
        for place, sample in enumerate(samples):
            if sample.requires_grad:
                yield sample.register_hook(partial(self._note, place, sample)).remove

    def _note(self, place: int, sample: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self._arguments.pop(place, None)
        if gradient is not None and (now := strides_of(gradient)) != _compact_strides(sample):
            self._arguments[place] = now

    def to_graph(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a replay, whose gradients get the strides that were noted."""
        if not self._arguments:
            return args, kwargs
        given = [*args]
        for place, strides in self._arguments.items():
            if given[place].requires_grad:
                given[place] = _laid_out(given[place], strides)
        return given, kwargs

    def broken(self, gradients: Sequence[torch.Tensor | None]) -> Mismatch | None:
        """The first of the results' gradients that comes otherwise than in the capture."""
        for number, strides in self._results.items():
            gradient = gradients[number]
            if gradient is not None and not _alike(gradient, strides):
                now = strides_of(gradient)
                return _mismatch(f"result {number}", f"strides {strides}", f"strides {now}")
        return None


def _mismatch(name: str, expected: object, actual: object) -> Mismatch:
    subject = f"the layout of the gradient of {name}"
    return Mismatch("layout", subject, str(expected), str(actual), _CAUSE)


def _laid_out(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    return pass_on(tensor, same_memory, partial(_copied_to, strides))


def _copied_to(strides: Strides, gradient: torch.Tensor) -> torch.Tensor:
    once = gradient
    for dim, stride in enumerate(strides):
        once = once if stride else once.narrow(dim, 0, min(1, once.shape[dim]))
    return once.new_empty_strided(once.shape, strides).copy_(once).expand_as(gradient)


def is_awaited(value: Any) -> bool:
    """Whether it is the result of a collective that is not waited for yet."""
    return isinstance(value, AsyncCollectiveTensor)


def awaited(tensor: torch.Tensor, spec: Any = None) -> torch.Tensor:
    """The tensor itself, or what it stands for, once it is there, on the same memory.

    Of a DTensor the local tensor, whose gradient is laid out by ``spec``.
    """
    if spec is None and not is_awaited(tensor):
        return tensor
    if not tensor.requires_grad:
        return local(tensor)  # type: ignore[no-any-return]
    copies = tensor.retains_grad or bool(tensor._backward_hooks)

    def give(gradient: torch.Tensor) -> Any:
        return laid_out(gradient.clone() if copies else gradient, spec)  # See the notes on leaves.

    return pass_on(tensor, lambda outer: same_memory(local(outer)), give)


def is_plain_tensor(value: Any) -> bool:
    """Whether a tensor is its values in memory and no more: no subclass, no Python attributes."""
    return type(value) is torch.Tensor and not vars(value) and is_dense(value)


class Mark:
    """Stands for a leaf of the arguments whose value the form of calls does not hold."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Input(Mark):
    """A tensor that a graph gets or returns."""

    def is_like(self, value: Any) -> bool:
        """Whether the graph can take ``value`` there."""
        return is_plain_tensor(value) or is_awaited(value)

    def to_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the graph gets of the caller's tensor."""
        return awaited(tensor)

    def from_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the unit gets of the graph's tensor; the reverse of :meth:`to_graph`."""
        return tensor


class Layout(Input):
    """How a DTensor that a unit gets or returns is laid out; ``name`` is for messages."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.spec, self._name = spec_of(tensor), name
        placements, shape = self.spec.placements, tuple(self.spec.shape)
        super().__init__(f"a DTensor of shape {shape} with placements {placements}")
        self._of_gradient = copy.copy(self.spec)
        whole = (Replicate() if isinstance(p, Partial) else p for p in self.spec.placements)
        self._of_gradient.placements = tuple(whole)
        self._shape = local(tensor).shape
        self.refuse: Callable[[Mismatch], object] = _refuse
        """Called with what is wrong with a gradient."""
        self._last: tuple[ReferenceType[torch.Tensor], ReferenceType[torch.Tensor]] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def is_like(self, value: Any) -> bool:
        return type(value) is DTensor and (value._spec is self.spec or value._spec == self.spec)

    def to_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        made = awaited(tensor, self._of_gradient)
        self._last = ref(made), ref(tensor)
        return made

    def from_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        """The DTensor of a local tensor; the same one, if it was just opened or made."""
        same = self._last[1]() if self._last and self._last[0]() is tensor else None
        if same is None:
            same = pass_on(tensor, lambda own: laid_out(same_memory(own), self.spec), self._give)
            self._last = ref(tensor), ref(same)
        return same

    def _give(self, gradient: torch.Tensor) -> Any:
        if (found := self.broken(gradient)) is not None:
            self.refuse(found)
        return local(gradient)

    def broken(self, gradient: torch.Tensor | None) -> Mismatch | None:
        """What is wrong with a gradient; autograd wants parts of it as large as the tensor's."""
        now = spec_of(gradient)
        if gradient is None or (
            same_placements(self._of_gradient, now) and local(gradient).shape == self._shape
        ):
            return None
        return _mismatch(self._name, self._of_gradient.placements, now and now.placements)


def _refuse(mismatch: Mismatch) -> NoReturn:
    raise CaptureError(mismatch.text("a unit"))
