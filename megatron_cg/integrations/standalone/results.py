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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

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

    leaves: Sequence[Any]
    """The leaves of what it returned, with marks for tensors."""
    spec: TreeSpec
    """The containers around them; all types that torch's pytrees know."""
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
        marks: dict[int, Any] = {id(given): _Argument(name) for name, given in arguments.items()}

        def marked(leaf: Any) -> Any:
            if type(leaf) not in (torch.Tensor, nn.Parameter):
                return leaf
            if id(leaf) not in marks:
                marks[id(leaf)] = _Output(len(tensors))
                tensors.append(leaf)
            return marks[id(leaf)]

        leaves, spec = tree_flatten(value)
        form = [marked(leaf) for leaf in leaves]
        return cls(form, spec, tuple((o, n, marked(o[n])) for o, n in attributes)), tensors

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
        return tree_unflatten([filled(leaf) for leaf in self.leaves], self.spec)

    @cached_property
    def _only_set(self) -> set[_Output]:
        """The outputs of the graph that are set and not returned."""
        returned = {leaf for leaf in self.leaves if isinstance(leaf, _Output)}
        return {mark for *_, mark in self.attributes if isinstance(mark, _Output)} - returned

    def of_eager_pass(self, value: Any, run: Callable[..., Any]) -> Any:
        """What an eager pass returned and set, given to ``run`` as one result of a function."""
        places = [(holder, name) for holder, name, _ in self.attributes if name in holder]
        value, attributes = run(lambda: (value, [holder[name] for holder, name in places]))
        for (holder, name), tensor in zip(places, attributes, strict=True):
            holder[name] = tensor
        return value

    def problem(self) -> str | None:
        """Why no graph can return this form, in words; None if one can."""
        for leaf in self.leaves:
            if not isinstance(leaf, _Output | _Argument) and not is_plain(leaf):
                return f"returns a {type(leaf).__name__}"
        return None

    def is_like(self, other: Results) -> bool:
        """Whether another pass returned and set the same, but for the tensors' values."""
        places = [(id(o), n, m) for o, n, m in self.attributes]
        return (
            self.spec == other.spec
            and places == [(id(o), n, m) for o, n, m in other.attributes]
            and all(
                a == b or same_value(a, b) for a, b in zip(self.leaves, other.leaves, strict=True)
            )
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
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def containers_of(arguments: Any) -> Iterator[tuple[Any, Any]]:
    """The lists and dicts in some arguments, each with its elements."""
    if isinstance(arguments, list | dict):
        yield arguments, [*arguments.items()] if isinstance(arguments, dict) else [*arguments]
    if isinstance(arguments, list | tuple | dict):
        inner = arguments.values() if isinstance(arguments, dict) else arguments
        for element in [*inner]:
            yield from containers_of(element)


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
