"""The form of a unit's calls: which arguments are tensors, and which are constants.

A graph takes tensors and nothing else. Modules of plain PyTorch also take flags and None
(``nn.TransformerEncoder`` passes ``is_causal`` to its layers). An argument that is no tensor keeps
its observed value: capture uses it, and a call with another value is not replayed. Tensors may be
in tuples, lists and dicts, as the cosines and sines that models of transformers pass to each layer.

A graph gets the first tensor of a call by position, and all others by name, such as ``mask`` or
``position_embeddings[0]``. So a table that is given by position, as torchtitan gives ``freqs_cis``,
can be read in place like one by keyword.

Note [Expanded tensors]
    Nothing can be copied into a tensor whose elements share memory, such as a mask that is expanded
    over the batch. So a graph gets what was expanded, and expands it itself. Its gradient would be
    summed elsewhere than in eager training, so an expanded tensor that needs one is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from megatron_cg.capture.static_inputs import positional_names
from megatron_cg.memory.storage import is_dense
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guard.inputs import described
from megatron_cg.replay.plain import contents, same_value

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types that compare by value and cannot change in place."""
_CONTAINERS = (tuple, list, dict)
"""Types, without their subclasses, that may hold tensors and constants."""


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


class _Expanded(_Mark):
    """An input of the graph that is expanded in some dimensions; see Note [Expanded tensors]."""

    def __init__(self, tensor: torch.Tensor, dims: Sequence[int]) -> None:
        super().__init__(f"a tensor of shape {tuple(tensor.shape)}, expanded")
        self._shape, self._dims = tensor.shape, tuple(dims)

    def is_like(self, value: Any) -> bool:
        """Whether ``value`` is a tensor that is expanded in the same way."""
        if not _is_plain_tensor(value) or value.shape != self._shape:
            return False
        return all(value.stride(dim) == 0 for dim in self._dims)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was expanded to ``tensor``."""
        for dim in self._dims:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def expand(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`reduce`."""
        return tensor.expand(self._shape)


class _Attributed(_Mark):
    """An input of the graph with a class or Python attributes of its own, which units may use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kind, self._attributes = type(tensor), dict(vars(tensor))
        names = ", ".join(map(str, self._attributes)) or "no attributes"
        super().__init__(f"a {self._kind.__name__} with {names}")
        self._contents = contents(self._attributes)

    def is_like(self, value: Any) -> bool:
        """Whether ``value`` is a tensor of the same class with the same attributes."""
        return type(value) is self._kind and contents(vars(value)) == self._contents

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with that class and these attributes."""
        if type(tensor) is not self._kind:
            tensor = tensor.as_subclass(self._kind)
        vars(tensor).update(self._attributes)
        return tensor


class _Again(_Mark):
    """A tensor that the call gives a second time, so that a graph sums the gradients of both.

    Args:
        name: where it is given first.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the tensor of argument {name}")
        self.name = name


@dataclass(frozen=True)
class CallForm:
    """The form of one unit's calls.

    ``args`` and ``kwargs`` hold a mark for each tensor, also inside of containers, and every other
    argument itself. ``positions`` are the names of the positional arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    positions: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a keyword that is left out stands for."""

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallForm:
        """The form of ``forward(*args, **kwargs)``."""
        parameters = inspect.signature(forward).parameters.values()
        positions = tuple(positional_names(forward, len(args), kwargs))
        seen: dict[int, str] = {}
        return cls(
            tuple(_marked(n, value, seen) for n, value in zip(positions, args, strict=True)),
            {name: _marked(name, value, seen) for name, value in kwargs.items()},
            positions,
            {p.name: p.default for p in parameters if p.default is not p.empty},
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of the tensor that a graph gets by position; empty if there is none."""
        inputs = [name for name, mark in self._marks if _is_input(mark)]
        return tuple(inputs[:1])

    @cached_property
    def _marks(self) -> list[tuple[str, Any]]:
        given = [*zip(self.positions, self.args, strict=True), *self.kwargs.items()]
        leaves = chain.from_iterable(_inside(name, mark, mark) for name, mark in given)
        return [(name, mark) for name, mark, _ in leaves]

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], Mismatch | None]:
        """A call's first tensor, the others by name, and the first mismatch with this form."""
        if len(args) != len(self.args):
            mismatch = Mismatch(
                "structure",
                "the number of positional arguments",
                str(len(self.args)),
                str(len(args)),
                "The unit is called in another way than at capture.",
            )
            return (), {}, mismatch
        tensors: dict[str, torch.Tensor] = {}
        for name, expected, actual in self._leaves(args, kwargs):
            if isinstance(expected, _Again):
                if tensors.get(expected.name) is not actual:
                    return (), {}, _mismatch(name, expected, actual)
            elif not _same(expected, actual):
                return (), {}, _mismatch(name, expected, actual)
            if expected is _TENSOR:
                tensors[name] = actual
            elif isinstance(expected, _Attributed):
                tensors[name] = actual.as_subclass(torch.Tensor)
            elif isinstance(expected, _Expanded):
                tensors[name] = expected.reduce(actual)
        if (twice := _given_twice(tensors)) is not None:
            return (), {}, _mismatch(twice, _TENSOR, _Again("before it"))
        return tuple(tensors.pop(name) for name in self.names), tensors, None

    def join(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call with these tensors; the reverse of :meth:`split`."""
        tensors = {**kwargs, **dict(zip(self.names, args, strict=True))}
        positional = zip(self.positions, self.args, strict=True)
        return (
            tuple(_filled(name, mark, tensors) for name, mark in positional),
            {name: _filled(name, mark, tensors) for name, mark in self.kwargs.items()},
        )

    def by_name(
        self, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The tensors of :meth:`split` under their names, but for those that are expanded."""
        named = {**dict(zip(self.names, args, strict=True)), **kwargs}
        for name in self._expanded:
            named.pop(name, None)
        return named

    @cached_property
    def _expanded(self) -> list[str]:
        return [name for name, mark in self._marks if isinstance(mark, _Expanded)]

    def problems(self) -> list[str]:
        """Why no graph can take this form, in words; empty if one can."""
        problems = [
            f"argument {name} is {_in_words(value)}"
            for name, value in self._marks
            if not isinstance(value, (_Mark, *_CONSTANTS))
        ]
        if not self.names:
            problems.append("no argument is a tensor")
        return problems

    def _leaves(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, Any]]:
        """Name, expected and actual value of all that a call of this number of arguments gives."""
        entries = list(zip(self.positions, self.args, args, strict=True))
        for name, mark in self.kwargs.items():
            entries.append((name, mark, kwargs[name] if name in kwargs else self._left_out(name)))
        # In the call's order, which is that of all ranks: a set's is not.
        new = [name for name in kwargs if name not in self.kwargs]
        entries += [(name, self._left_out(name), kwargs[name]) for name in new]
        for name, mark, value in entries:
            if type(mark) in _CONTAINERS:
                yield from _inside(name, mark, value)
            else:
                yield name, mark, value

    def _left_out(self, name: str) -> Any:
        return self.defaults.get(name, _ABSENT)


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions whose elements share memory."""
    pairs = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
    return [dim for dim, (stride, size) in pairs if stride == 0 and size > 1]


def _marked(name: str, value: Any, seen: dict[int, str]) -> Any:
    if type(value) is dict:
        return {key: _marked(f"{name}[{key!r}]", inner, seen) for key, inner in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_marked(f"{name}[{n}]", inner, seen) for n, inner in enumerate(value))
    if id(value) in seen:
        return _Again(seen[id(value)])
    if isinstance(value, torch.Tensor) and value.requires_grad:
        seen[id(value)] = name
    if not isinstance(value, torch.Tensor) or not is_dense(value):
        return value
    if not _is_plain_tensor(value):
        is_wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return value if is_wrapper else _Attributed(value)
    dims = [] if value.requires_grad else expanded_dims(value)
    return _Expanded(value, dims) if dims else _TENSOR


def _given_twice(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of an argument whose gradient would be summed with that of another, outside."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            if id(tensor) in seen:
                return name
            seen.add(id(tensor))
    return None


def _is_plain_tensor(value: Any) -> bool:
    """Whether a tensor is its values in memory and no more: no subclass, no Python attributes."""
    if type(value) is nn.Parameter:
        return is_dense(value)
    return type(value) is torch.Tensor and not vars(value) and is_dense(value)


def _is_input(mark: Any) -> bool:
    return mark is _TENSOR or isinstance(mark, _Expanded | _Attributed)


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or _is_plain_tensor(value):
        return described(value)
    if is_dense(value):
        return f"a {type(value).__name__}, a subclass of torch.Tensor whose methods no graph runs"
    kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
    return f"a {kind} tensor and not dense"


def _inside(name: str, expected: Any, actual: Any) -> Iterator[tuple[str, Any, Any]]:
    """What is inside of two containers of one type and length; anything else is a leaf."""
    kind = type(expected)
    if kind not in _CONTAINERS or type(actual) is not kind or len(actual) != len(expected):
        yield name, expected, actual
    elif kind is not dict:
        for index, (mark, value) in enumerate(zip(expected, actual, strict=True)):
            yield from _inside(f"{name}[{index}]", mark, value)
    elif list(expected) != list(actual):
        yield name, expected, actual
    else:
        for key, mark in expected.items():
            yield from _inside(f"{name}[{key!r}]", mark, actual[key])


def _filled(name: str, mark: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """An argument of this form, with its tensors by name."""
    if type(mark) is dict:
        return {key: _filled(f"{name}[{key!r}]", inner, tensors) for key, inner in mark.items()}
    if type(mark) in _CONTAINERS:
        return type(mark)(_filled(f"{name}[{n}]", inner, tensors) for n, inner in enumerate(mark))
    if isinstance(mark, _Expanded):
        return mark.expand(tensors[name])
    if isinstance(mark, _Attributed):
        return mark.give(tensors[name])
    if isinstance(mark, _Again):
        return tensors[mark.name]
    return tensors[name] if mark is _TENSOR else mark


def _same(expected: Any, actual: Any) -> bool:
    if expected is actual:  # An observed call is compared with itself.
        return True
    if isinstance(expected, _Expanded | _Attributed):
        return expected.is_like(actual)
    if isinstance(expected, _Mark) or isinstance(actual, torch.Tensor):
        return expected is _TENSOR and _is_plain_tensor(actual)
    # Only containers that differ are compared as a whole. 1 == True, but a module may treat them
    # differently.
    same_type = type(expected) is type(actual) and type(expected) not in _CONTAINERS
    return same_type and same_value(expected, actual)


def _mismatch(name: str, expected: Any, actual: Any) -> Mismatch:
    return Mismatch(
        "structure",
        f"argument {name}",
        repr(expected) if isinstance(expected, _Mark) else described(expected),
        _in_words(actual),
        "Only tensors go into a graph; all else is in it as it was at capture.",
    )
