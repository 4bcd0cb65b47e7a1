"""What a unit's pass returns and sets, as the tensors of a graph, and the reverse.

A graph returns tensors and nothing else. A unit may return them in tuples, lists, dicts, and named
tuples, and in dataclasses, beside None, numbers and strings, which are constants. And it may set
tensors as attributes of its modules, as MoE layers hand over their auxiliary loss: these become
outputs of the graph too, and each replay sets them again.

Note [The same tensor]
    A unit may return its own argument, or one tensor twice, or set what it returns as an attribute.
    Each replay then gives one tensor too: the caller's own, for an argument without a gradient. The
    gradient of an argument is summed in the graph, with those of the unit's other uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from megatron_cg.replay.borders import spec_of
from megatron_cg.replay.plain import is_plain, same_value
from megatron_cg.units.call import in_parts
from megatron_cg.units.layouts import Layout, awaited, is_awaited

Place = tuple[nn.Module, str]
"""An attribute of a module."""


@dataclass(frozen=True)
class _Tensor:
    """Stands for an output of the graph, by number, or for a tensor that the caller gave."""

    key: int | str


@dataclass(frozen=True)
class Results:
    """The form of what one pass returned and set."""

    leaves: Sequence[Any]
    """The leaves of what it returned, with marks for tensors."""
    spec: TreeSpec
    """The containers around them; all types that torch's pytrees know."""
    attributes: Mapping[Place, Any]
    """The marks of the tensors that it set."""
    layouts: Mapping[int, Layout]
    """Of outputs of the graph that are DTensors, by number."""

    @classmethod
    def of(
        cls,
        value: Any,
        attributes: Mapping[Place, Any],
        arguments: Mapping[str, torch.Tensor],
        *,
        without_gradient: Iterable[str],
        seen: Mapping[Any, Layout],
        laid_out: Callable[[int, torch.Tensor, Any], torch.Tensor],
    ) -> tuple[Results, list[torch.Tensor]]:
        """The form of a pass that returned ``value``, and the tensors that its graph returns.

        ``attributes`` are the tensors that it set, ``arguments`` those that it was given;
        ``without_gradient`` names those that are there for each replay and need no gradient.
        ``seen`` are the layouts in the steps before by the keys of :func:`results_of`. ``laid_out``
        gets an output's number, the output and that key, and returns what the graph returns.
        """
        tensors: list[torch.Tensor] = []
        layouts: dict[int, Layout] = {}
        value = in_parts(value)
        keys = {id(tensor): key for key, tensor in results_of(value, attributes)}
        marks = {id(arguments[name]): _Tensor(name) for name in without_gradient}

        def marked(leaf: Any) -> Any:
            is_tensor = type(leaf) in (torch.Tensor, nn.Parameter) or is_awaited(leaf)
            is_distributed = spec_of(leaf) is not None
            if not is_tensor and not is_distributed:
                return leaf
            if id(leaf) not in marks:
                number = len(tensors)
                marks[id(leaf)] = _Tensor(number)
                key = keys.get(id(leaf))
                if is_distributed:
                    layouts[number] = Layout.of_result(leaf, number, seen.get(key))
                made = layouts[number].to_local(leaf) if is_distributed else awaited(leaf)
                tensors.append(laid_out(number, made, key))
            return marks[id(leaf)]

        leaves, spec = tree_flatten(value, is_plain)
        form = [marked(leaf) for leaf in leaves]
        made = {p: marked(one) for p, one in attributes.items()}
        return cls(form, spec, made, layouts), tensors

    def rebuild(self, outputs: Sequence[Any], arguments: Mapping[str, torch.Tensor]) -> Any:
        """Set the attributes, and return what the pass returns, with these tensors."""
        tensors: dict[Any, Any] = {**arguments, **dict(enumerate(outputs))}
        for number, layout in self.layouts.items():
            tensors[number] = layout.from_local(tensors[number])
        for (module, name), mark in self.attributes.items():
            made = tensors[mark.key]
            # A copy: the attribute, and what a loop collects from it, outlive the pass.
            vars(module)[name] = made.clone() if mark.key in self._only_set else made
        filled = [tensors[leaf.key] if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(filled, self.spec)

    @cached_property
    def _only_set(self) -> set[Any]:
        """The outputs of the graph that are set and not returned."""
        returned = {leaf.key for leaf in self.leaves if isinstance(leaf, _Tensor)}
        return {one.key for one in self.attributes.values() if isinstance(one.key, int)} - returned

    def run_eagerly(self, run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Give an eager pass to ``run``, which gets what it returns and sets as one result."""

        def whole() -> tuple[Any, list[Any]]:
            value = in_parts(function(*args, **kwargs))
            return value, [vars(module).get(name) for module, name in self.attributes]

        value, attributes = run(whole)
        for (module, name), tensor in zip(self.attributes, attributes, strict=True):
            if name in vars(module):
                vars(module)[name] = tensor
        leaves, spec = tree_flatten(value)
        return tree_unflatten(leaves, spec)

    def problem(self, before: Results | None) -> str | None:
        """Why no graph can return this form, after the pass ``before``; None if one can."""
        for leaf in (*self.leaves, *self.attributes.values()):
            if not isinstance(leaf, _Tensor) and not is_plain(leaf):
                return f"returns, or sets as an attribute, a {type(leaf).__name__}"
        if before is None or (
            (self.spec, self.attributes, self.layouts)
            == (before.spec, before.attributes, before.layouts)
            and all(map(_same, self.leaves, before.leaves))
        ):
            return None
        return "returns, or sets as attributes, something else in each pass"


def results_of(
    value: Any, attributes: Mapping[Place, torch.Tensor]
) -> list[tuple[Any, torch.Tensor]]:
    """The tensors that a pass returns, by number, and that it sets, by place."""
    return [*enumerate(tensors_of(value)), *attributes.items()]


def _same(leaf: Any, other: Any) -> bool:
    return leaf == other if isinstance(leaf, _Tensor) else same_value(leaf, other)


def attributes_of(modules: Iterable[nn.Module]) -> dict[Place, torch.Tensor]:
    """The tensors that modules have as attributes."""
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a pass's result, at any depth."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
