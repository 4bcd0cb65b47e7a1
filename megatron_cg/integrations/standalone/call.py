"""The form of a unit's calls: which arguments are tensors, and which are constants.

A graph takes tensors and nothing else. Modules of plain PyTorch also take flags and None
(``nn.TransformerEncoder`` passes ``is_causal`` to its layers). An argument that is no tensor keeps
its observed value: capture uses it, and a call with another value is not replayed.

A graph gets the first tensor that is given by position, and all others by name. So a table that is
given by position, as torchtitan gives ``freqs_cis``, can be read in place like one by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_cg.capture.static_inputs import positional_names
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guard.inputs import described

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types that compare by value and cannot change in place."""


class _Mark:
    """Stands for an argument whose value the form does not hold."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_TENSOR = _Mark("a tensor")
"""An input of the graph."""
_ABSENT = _Mark("not given")
"""A keyword that is left out and whose default is unknown."""


@dataclass(frozen=True)
class CallForm:
    """The form of one unit's calls.

    ``args`` and ``kwargs`` hold a mark for each tensor and every other argument itself. ``tensors``
    are the names of the positional tensors.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a keyword that is left out stands for."""

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallForm:
        """The form of ``forward(*args, **kwargs)``."""
        names = positional_names(forward, len(args), kwargs)
        parameters = inspect.signature(forward).parameters.values()
        return cls(
            tuple(_marked(value) for value in args),
            {name: _marked(value) for name, value in kwargs.items()},
            tuple(n for n, v in zip(names, args, strict=True) if isinstance(v, torch.Tensor)),
            {one.name: one.default for one in parameters if one.default is not one.empty},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the tensor that a graph gets by position; empty if there is none."""
        return self.tensors[:1]

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], Mismatch | None]:
        """A call's first positional tensor, the others by name, and the first mismatch with this
        form.
        """
        if len(args) != len(self.args):
            found = Mismatch(
                "structure",
                "the number of positional arguments",
                str(len(self.args)),
                str(len(args)),
                "The unit is called in another way than at capture.",
            )
            return (), {}, found
        names = [*self.kwargs, *(name for name in kwargs if name not in self.kwargs)]
        entries = [(f"number {n}", old, args[n]) for n, old in enumerate(self.args)]
        left_out = {name: self.defaults.get(name, _ABSENT) for name in names}
        entries += [(n, self.kwargs.get(n, left_out[n]), kwargs.get(n, left_out[n])) for n in names]
        for name, expected, actual in entries:
            if not _same(expected, actual):
                return (), {}, _mismatch(name, expected, actual)
        given = [v for v, old in zip(args, self.args, strict=True) if old is _TENSOR]
        by_name = dict(zip(self.tensors[1:], given[1:], strict=True))
        by_name |= {name: kwargs[name] for name, old in self.kwargs.items() if old is _TENSOR}
        return tuple(given[:1]), by_name, None

    def join(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call with these tensors; the reverse of :meth:`split`."""
        tensors = iter((*args, *(kwargs[name] for name in self.tensors[1:])))
        positional = tuple(next(tensors) if old is _TENSOR else old for old in self.args)
        by_name = {n: kwargs[n] if old is _TENSOR else old for n, old in self.kwargs.items()}
        return positional, by_name

    def problems(self) -> list[str]:
        """Why no graph can take this form, in words; empty if one can."""
        entries = [(f"number {n}", value) for n, value in enumerate(self.args)]
        found = [
            f"argument {name} is {described(value)}"
            for name, value in [*entries, *self.kwargs.items()]
            if value is not _TENSOR and not isinstance(value, _CONSTANTS)
        ]
        if not self.tensors:
            found.append("no argument given by position is a tensor")
        return found


def _marked(value: Any) -> Any:
    return _TENSOR if isinstance(value, torch.Tensor) else value


def _same(expected: Any, actual: Any) -> bool:
    if expected is _TENSOR or isinstance(actual, torch.Tensor):
        return expected is _TENSOR and isinstance(actual, torch.Tensor)
    # 1 == True, but a module may treat them differently.
    return type(expected) is type(actual) and bool(expected == actual)


def _mismatch(name: str, expected: Any, actual: Any) -> Mismatch:
    return Mismatch(
        "structure",
        f"argument {name}",
        "a tensor" if expected is _TENSOR else described(expected),
        described(actual),
        "Only tensors go into a graph; all else is in it as it was at capture.",
    )
