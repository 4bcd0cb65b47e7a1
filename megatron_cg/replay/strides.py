"""The strides of gradients at the border of a graph.

Note [Strides of gradients]
    Kernels that add go through memory in its own order, so the strides of a gradient decide the
    last bits of sums over it: a bias gets other ones from ``y.sum()``, whose gradient is one number
    that is expanded, than from a dense tensor of the same values. A graph reads gradients of its
    results in memory that is laid out like the results, and autograd gives the gradient of an
    argument the strides of the argument. So gradients are laid out again: inside of the graph those
    of results, as they came in the steps before, and behind it those of arguments, as the unit's
    own code made them. A gradient of a result that comes otherwise later is a mismatch.

Relied on: torch 2.11, the hooks of a leaf see its gradient before ``AccumulateGrad`` copies it to
the strides of the leaf (``accumulate_grad.h``, ``clone_obey_contract``).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_cg.replay.dtensors import local
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.own_gradients import PassedOn, same_memory
from megatron_cg.upstream.patch import Undo

Strides = tuple[int, ...]
_CAUSE = (
    "Sums over another layout round otherwise. Use what the unit returns in the same way in each "
    "step, or leave the unit out of units."
)


def strides_of(tensor: torch.Tensor) -> Strides:
    """Its strides; 0 for a dimension of one element, or of elements that share memory."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride if size > 1 else 0 for stride, size in pairs)


def _is_compact(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory, so that a new tensor like it has its strides."""
    step = 1
    for stride, size in sorted(zip(strides_of(tensor), tensor.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


class Noted:
    """The strides of the gradient of one result, in the passes of a step."""

    def __init__(self, name: str) -> None:
        self._name = name
        """For messages."""
        self._last: tuple[torch.Size, Strides] | None = None
        self.varies: Mismatch | None = None
        """What gradients came, if those of one shape were not alike."""
        self.inside: Noted | None = None
        """The same with uses inside of the unit, if it has any. Their strides count for a result
        that no gradient comes for: a graph adds zeros, and that sum shall have them."""

    def note(self, gradient: torch.Tensor | None) -> None:
        """A gradient came; None stands for zeros, of which nothing depends on strides."""
        if gradient is None:
            return
        own = local(gradient)
        before, now = self._last, (own.shape, strides_of(own))
        if before is not None and before[0] == now[0] and before != now:
            self.varies = _mismatch(self._name, before[1], now[1])
        self._last = now

    def of(self, tensor: torch.Tensor) -> Strides | None:
        """The strides of the gradient of such a result; None if none came."""
        last = self._last or (self.inside and self.inside._last)
        return last[1] if last and last[0] == tensor.shape else None


class Gradients:
    """The gradients of a unit's results and arguments, as its graph has them."""

    def __init__(self) -> None:
        self._results: dict[int, Strides] = {}
        """By the number of the graph's output."""
        self._arguments: dict[int | str, Strides] = {}
        """By position or name, of those that autograd would give other strides."""

    def result(self, number: int, tensor: torch.Tensor, seen: Noted | None) -> torch.Tensor:
        """An output of the graph, whose gradient is laid out as ``seen``."""
        own = strides_of(tensor) if _is_compact(tensor) else None
        strides = (seen and seen.of(tensor)) or own
        if strides is None or not tensor.requires_grad:
            return tensor
        self._results[number] = strides
        return tensor if strides == own else _laid_out(tensor, strides)

    def note_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Undo]:
        """Note the gradients of these samples in each backward pass, until all is undone."""
        samples: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        for key, sample in samples:
            if sample.requires_grad:
                yield sample.register_hook(partial(self._note, key, sample)).remove

    def _note(self, key: int | str, sample: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self._arguments.pop(key, None)
        own = strides_of(sample) if _is_compact(sample) else None
        if gradient is not None and (now := strides_of(gradient)) != own:
            self._arguments[key] = now

    def given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of a replay, whose gradients get the strides that were noted."""
        if not self._arguments:
            return args, kwargs
        return [self._given(*item) for item in enumerate(args)], {
            name: self._given(name, value) for name, value in kwargs.items()
        }

    def _given(self, key: int | str, value: Any) -> Any:
        if key not in self._arguments or not value.requires_grad:
            return value
        return _laid_out(value, self._arguments[key])

    def broken(self, gradients: Sequence[torch.Tensor | None]) -> Mismatch | None:
        """The first of the results' gradients that comes otherwise than in the capture."""
        for number, strides in self._results.items():
            gradient = gradients[number]
            if gradient is not None and (now := strides_of(gradient)) != strides:
                return _mismatch(f"result {number}", strides, now)
        return None


def _mismatch(name: str, expected: Strides, actual: Strides) -> Mismatch:
    subject = f"the layout of the gradient of {name}"
    return Mismatch("layout", subject, f"strides {expected}", f"strides {actual}", _CAUSE)


class _LaidOut(PassedOn):
    """And its gradient in memory of its own with other strides."""


def _laid_out(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    apply: Any = _LaidOut.apply
    made: torch.Tensor = apply(tensor, same_memory, partial(_copied_to, strides))
    return made


def _copied_to(strides: Strides, gradient: torch.Tensor) -> torch.Tensor:
    once = gradient
    for dim, stride in enumerate(strides):
        once = once if stride else once.narrow(dim, 0, min(1, once.shape[dim]))
    return once.new_empty_strided(once.shape, strides).copy_(once).expand_as(gradient)
