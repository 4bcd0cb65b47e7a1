"""What a unit's pass returns and sets, as the tensors of a graph, and the reverse.

A graph returns tensors and nothing else. A unit may return them in tuples, lists, dicts, and named
tuples, beside None, numbers and strings, which are constants. And it may set
tensors as attributes of its modules, as MoE layers hand over their auxiliary loss: these become
outputs of the graph too, and each replay sets them again.

Note [The same tensor]
    A unit may return its own argument, or one tensor twice, or set what it returns as an attribute.
    Each replay then gives one tensor too: the caller's own, for an argument without a gradient. The
    gradient of an argument is summed in the graph, with those of the unit's other uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_cg.errors import CaptureError
from megatron_cg.replay.plain import is_plain, same_value

_Place = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class _Output:
    """Stands for the output of a graph with this number."""

    number: int


@dataclass(frozen=True)
class _Argument:
    """Stands for the tensor that the caller gave under this name."""

    name: str


@dataclass(frozen=True)
class Results:
    """The form of what one pass returned and set."""

    value: Any
    """What it returned, with marks for tensors."""
    attributes: tuple[tuple[dict[str, Any], str, Any], ...]
    """Holder, name and mark of the tensors that it set."""

    @classmethod
    def of(
        cls,
        value: Any,
        attributes: Sequence[_Place],
        arguments: Mapping[str, torch.Tensor],
    ) -> tuple[Results, list[torch.Tensor]]:
        """The form of a pass, and the tensors that its graph returns.

        Args:
            value: what the pass returned.
            attributes: holder and name of the tensors that it set.
            arguments: the tensors without a gradient that it was given, by name.
        """
        tensors: list[torch.Tensor] = []
        marks: dict[int, Any] = {id(one): _Argument(name) for name, one in arguments.items()}

        def marked(leaf: Any) -> Any:
            if type(leaf) not in (torch.Tensor, nn.Parameter):
                return leaf
            if id(leaf) not in marks:
                marks[id(leaf)] = _Output(len(tensors))
                tensors.append(leaf)
            return marks[id(leaf)]

        form = _mapped(marked, value)
        return cls(form, tuple((o, n, marked(o[n])) for o, n in attributes)), tensors

    def rebuild(self, tensors: Sequence[Any], arguments: Mapping[str, torch.Tensor]) -> Any:
        """Set the attributes, and return what the pass returns, with these tensors."""

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, _Output):
                return tensors[leaf.number]
            return arguments[leaf.name] if isinstance(leaf, _Argument) else leaf

        for holder, name, mark in self.attributes:
            made = filled(mark)
            # A copy: the attribute, and what a loop collects from it, outlive the pass.
            holder[name] = made.clone() if mark in self._only_set else made
        return _mapped(filled, self.value)

    @cached_property
    def _only_set(self) -> set[_Output]:
        """The outputs of the graph that are set and not returned."""
        returned: list[Any] = []
        _mapped(returned.append, self.value)
        marks = {mark for _, _, mark in self.attributes if isinstance(mark, _Output)}
        return marks - {one for one in returned if isinstance(one, _Output)}

    def of_eager_pass(self, value: Any, run: Callable[..., Any]) -> Any:
        """What an eager pass returned and set, given to ``run`` as one result of a function."""
        places = [(holder, name) for holder, name, _ in self.attributes if name in holder]
        value, attributes = run(lambda: (value, [holder[name] for holder, name in places]))
        for (holder, name), one in zip(places, attributes, strict=True):
            holder[name] = one
        return value

    def problem(self) -> str | None:
        """Why no graph can return this form, in words; None if one can."""
        found: list[str] = []

        def look(leaf: Any) -> None:
            if not isinstance(leaf, _Output | _Argument) and not is_plain(leaf):
                found.append(f"returns a {type(leaf).__name__}")

        _mapped(look, self.value)
        return found[0] if found else None

    def is_like(self, other: Results) -> bool:
        """Whether another pass returned and set the same, but for the tensors' values."""
        mine, spec = tree_flatten(_mapped(lambda leaf: leaf, self.value))
        others, other_spec = tree_flatten(_mapped(lambda leaf: leaf, other.value))
        places = [(id(o), n, m) for o, n, m in self.attributes]
        return (
            spec == other_spec
            and places == [(id(o), n, m) for o, n, m in other.attributes]
            and all(a == b or same_value(a, b) for a, b in zip(mine, others, strict=True))
        )


@contextmanager
def attributes_set(modules: Sequence[nn.Module]) -> Iterator[Callable[[], list[_Place]]]:
    """Yields a function that returns which tensors modules got as attributes in the block."""
    before = {
        (number, name): value
        for number, module in enumerate(modules)
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }

    def found() -> list[_Place]:
        return [
            (vars(module), name)
            for number, module in enumerate(modules)
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and before.get((number, name)) is not value
        ]

    yield found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a pass's result, at any depth."""
    found: list[torch.Tensor] = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found


def containers_of(arguments: Any) -> Iterator[tuple[Any, Any]]:
    """The lists and dicts in some arguments, each with its elements."""
    if isinstance(arguments, list | dict):
        yield arguments, [*arguments.items()] if isinstance(arguments, dict) else [*arguments]
    if isinstance(arguments, list | tuple | dict):
        inner = arguments.values() if isinstance(arguments, dict) else arguments
        for one in [*inner]:
            yield from containers_of(one)


def refuse_filled(name: str, before: Sequence[tuple[Any, Any]], leave_out: str) -> None:
    """Raise CaptureError if a pass has changed one of :func:`containers_of`."""
    for container, elements in before:
        now = [*container.items()] if isinstance(container, dict) else container
        if not same_value([*now], [*elements]):
            raise CaptureError(
                f"{name} changes an argument, a {type(container).__name__}, in its forward pass. A "
                "replay runs no Python, so the caller would not see it. Return the tensors, or set "
                f"them as attributes of the module. Or: {leave_out}"
            )


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf changed; torch's registered types are containers."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([change(leaf) for leaf in leaves], spec)
