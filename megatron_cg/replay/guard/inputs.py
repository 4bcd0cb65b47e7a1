"""The inputs of a graph: their structure, their metadata, and which of them need no copy.

Note [What a graph does with its inputs]
    TE 2.20.2 (``graph.py``, ``functionalized`` and ``Graphed.forward``) copies each tensor into
    the captured static input, unless the tensor is already there. It checks neither shape nor
    dtype, and ``copy_`` broadcasts and converts. It silently ignores a keyword that was not in the
    samples. So all of this is checked here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from megatron_cg.replay.guard import Mismatch

_FIELDS = ("shape", "dtype", "stride", "device", "requires_grad")
"""Properties of a tensor that must be equal, by the name of the clause."""

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
        self._names = [*labels[: len(args)], *kwargs]
        self._captured = [_fields(tensor) for tensor in (*args, *kwargs.values())]
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
        flat = [*args, *[kwargs[name] for name in self._keywords]]
        for tensor, name, captured in zip(flat, self._names, self._captured, strict=True):
            # One comparison for the usual case: this runs for every input of every replay.
            if not isinstance(tensor, torch.Tensor) or captured != (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
                tensor.device,
                tensor.requires_grad,
            ):
                mismatch = self._other_kind(name, captured, tensor)
                if mismatch is not None:
                    return mismatch
        for number, address in self._borrowed:
            if flat[number].data_ptr() != address:
                return Mismatch(
                    "static input",
                    f"the memory of argument {self._names[number]}",
                    hex(address),
                    hex(flat[number].data_ptr()),
                    "It was one tensor in all steps before capture, so the graph reads it in "
                    "place. Copying another tensor there would overwrite the model's own.",
                )
        return None

    def _other_kind(self, name: str, captured: tuple[Any, ...], tensor: Any) -> Mismatch | None:
        if not isinstance(tensor, torch.Tensor):
            subject, cause = f"argument {name}", "A graph takes only tensors."
            return Mismatch("structure", subject, "a tensor", described(tensor), cause)
        for clause, before, now in zip(_FIELDS, captured, _fields(tensor), strict=True):
            # An input that needs no gradient any more gets one that nobody reads. But code may look
            # at that: torch's reentrant checkpoint then computes no gradients of weights either.
            is_allowed = clause == "requires_grad" and before and not self._same_gradients
            if before != now and not is_allowed:
                cause = f"{_CAUSE[clause]}: replaying would compute something else."
                return Mismatch(
                    clause, f"{clause} of argument {name}", _text(before), _text(now), cause
                )
        return None

    def are_returned(self, outputs: Iterable[Any]) -> bool:
        """Whether an output of the graph lies in the memory of its inputs, of which it has two.

        A graph copies one input after another (TE 2.20.2). It would overwrite such an output that
        comes back as another input before it reads it.
        """
        addresses = [value.data_ptr() for value in outputs if isinstance(value, torch.Tensor)]
        return len(self._names) > 1 and any(
            begin <= address < end for begin, end in self._memory for address in addresses
        )

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
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # The values of an object's tensors would be read on the host.
    text = "" if is_dataclass(value) else repr(value)
    return text if 0 < len(text) < 60 else f"a {type(value).__name__}"


def _fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def _text(value: Any) -> str:
    return str(tuple(value) if isinstance(value, torch.Size) else value)
