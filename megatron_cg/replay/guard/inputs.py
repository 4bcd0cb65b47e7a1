"""The inputs of a graph: their structure, their metadata, and which of them need no copy.

Note [What a graph does with its inputs]
    TE 2.20.2 (``graph.py``, ``functionalized`` and ``Graphed.forward``) copies each tensor into
    the captured static input, unless the tensor is already there. It checks neither shape nor
    dtype, and ``copy_`` broadcasts and converts. It silently ignores a keyword that was not in the
    samples. So all of this is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from megatron_cg.replay.guard.mismatch import Mismatch

FIELDS = ("shape", "dtype", "stride", "device")
"""Properties of a tensor that must be equal, by the name of the clause."""


"""The clause about inputs that never changed before capture; see ``static_inputs.py``."""

NOT_INPUTS = frozenset({"is_first_microbatch", "cuda_graph_stream", "cuda_graph_event"})
"""Keywords that control a replay and are not inputs of the graph: ``GraphableMegatronModule.
_get_te_cuda_graph_replay_args`` of megatron-core 0.19.2 adds them."""

_CAUSE = {
    "shape": "The sequence length or micro batch is another than at capture",
    "dtype": "The precision of this input has changed",
    "stride": "The strides of the input have changed, for example by a transpose or expand",
    "device": "The input is on another device",
    "requires_grad": "The graph computes gradients for the inputs that needed one at capture",
}


@dataclass(frozen=True)
class _Spec:
    name: str
    fields: tuple[Any, ...]
    requires_grad: bool
    address: int


class Inputs:
    """Structure and metadata of one graph's inputs.

    They are taken from the samples, as they are after capture. ``borrowed`` are those that are the
    model's own tensors; see ``static_inputs.py``. ``names`` are those of positional samples.
    ``same_gradients`` says that all inputs that needed a gradient at capture must need one.
    """

    def __init__(
        self,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        borrowed: Sequence[torch.Tensor] = (),
        names: Sequence[str] = ("hidden_states",),
        *,
        same_gradients: bool = False,
    ) -> None:
        self._same_gradients = same_gradients
        labels = [*names, *(f"number {index}" for index in range(len(names), len(args)))]
        own = {id(tensor) for tensor in borrowed}
        storages = [tensor.untyped_storage() for tensor in (*args, *kwargs.values())]
        self._memory = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        self._positional = len(args)
        self._keywords = tuple(kwargs)
        self._given: list[str] = []
        """The keywords of the last call that was as at capture."""
        self._specs = tuple(
            _Spec(name, _fields(tensor), tensor.requires_grad, tensor.data_ptr())
            for name, tensor in [*zip(labels, args, strict=False), *kwargs.items()]
        )
        self._captured = tuple((*spec.fields, spec.requires_grad) for spec in self._specs)
        self._borrowed = [
            (number, tensor.data_ptr())
            for number, tensor in enumerate((*args, *kwargs.values()))
            if id(tensor) in own
        ]

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """The first input that is not as it was at capture."""
        given = [name for name, value in kwargs.items() if value is not None]
        if given != self._given or len(args) != self._positional:
            mismatch = self._structure(args, kwargs)
            if mismatch is not None:
                return mismatch
            self._given = given
        flat = self._flat(args, kwargs)
        for tensor, spec, captured in zip(flat, self._specs, self._captured, strict=True):
            # One comparison for the usual case: this runs for every input of every replay.
            if not isinstance(tensor, torch.Tensor) or captured != (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
                tensor.device,
                tensor.requires_grad,
            ):
                mismatch = self._other_kind(tensor, spec)
                if mismatch is not None:
                    return mismatch
        for number, address in self._borrowed:
            if flat[number].data_ptr() != address:
                return Mismatch(
                    "static input",
                    f"the memory of argument {self._specs[number].name}",
                    hex(address),
                    hex(flat[number].data_ptr()),
                    "It was one tensor in all steps before capture, so the graph reads it in "
                    "place. Copying another tensor there would overwrite the model's own.",
                )
        return None

    def _other_kind(self, tensor: Any, spec: _Spec) -> Mismatch | None:
        if not isinstance(tensor, torch.Tensor):
            subject, cause = f"argument {spec.name}", "A graph takes only tensors."
            return Mismatch("structure", subject, "a tensor", described(tensor), cause)
        for name, before, now in zip(FIELDS, spec.fields, _fields(tensor), strict=True):
            if before != now:
                return _field(name, spec, before, now)
        # An input that needs no gradient any more gets one that nobody reads. But code may look at
        # that: torch's reentrant checkpoint then computes no gradients of weights either.
        if tensor.requires_grad > spec.requires_grad or (
            self._same_gradients and tensor.requires_grad != spec.requires_grad
        ):
            return _field("requires_grad", spec, spec.requires_grad, tensor.requires_grad)
        return None

    def are_returned(self, outputs: Iterable[Any]) -> bool:
        """Whether an output of the graph lies in the memory of its inputs, of which it has two."""
        return len(self._specs) > 1 and any(map(self._lies_here, outputs))

    def read_first(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with copies of those that lie in the memory of another input.

        A graph copies one input after another (TE 2.20.2), and overwrites these before it reads
        them: a unit that returns its inputs may get them back in another order.
        """
        specs = iter(self._specs)

        def own(value: Any) -> Any:
            in_place = value.data_ptr() == next(specs).address
            return value if in_place or not self._lies_here(value) else value.clone()

        flat = tuple(own(value) for value in args)
        return flat, {**kwargs, **{name: own(kwargs[name]) for name in self._keywords}}

    def _lies_here(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        address = value.data_ptr()
        return any(begin <= address < end for begin, end in self._memory)

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return [*args, *[kwargs[name] for name in self._keywords]]

    def _structure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        if len(args) != self._positional:
            subject, cause = "the number of positional arguments", "The layer is called otherwise."
            return Mismatch("structure", subject, str(self._positional), str(len(args)), cause)
        for name in self._keywords:
            if kwargs.get(name) is None:
                given = "missing" if name not in kwargs else "None"
                cause = "The layer is called with fewer inputs than at capture."
                return Mismatch("structure", f"argument {name}", "a tensor", given, cause)
        for name, value in kwargs.items():
            if value is not None and name not in self._keywords and name not in NOT_INPUTS:
                cause = "The graph would silently ignore this input."
                subject = f"argument {name}"
                return Mismatch("structure", subject, "not given", described(value), cause)
        return None


def described(value: Any) -> str:
    """A short description of ``value``."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # The values of an object's tensors would be read on the host.
    text = "" if is_dataclass(value) else repr(value)
    return text if 0 < len(text) < 60 else f"a {type(value).__name__}"


def _fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


def _field(clause: str, spec: _Spec, expected: Any, actual: Any) -> Mismatch:
    if clause == "shape":
        expected, actual = tuple(expected), tuple(actual)
    cause = f"{_CAUSE[clause]}: replaying would compute something else."
    subject = f"{clause} of argument {spec.name}"
    return Mismatch(clause, subject, str(expected), str(actual), cause)
