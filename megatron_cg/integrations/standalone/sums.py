"""Gradients that are summed over uses inside a unit and uses outside of it.

Autograd adds up the gradients of all uses of a tensor in the order in which it meets them. A
graph's backward pass sums the uses inside the unit first, and autograd adds only that sum to the
others. If uses outside of the unit come later in the forward pass, their gradients come earlier,
and with two uses inside the order of additions is another one: the last bits differ. So the graphs
of autograd of the steps before capture are looked at, and such a unit is refused.

Note [Casts that autocast caches]
    With its cache, autocast casts a weight once in a forward pass, so gradients of all its uses are
    summed in the lower precision. A unit is captured with the cache that it was seen with, since
    without one they would be summed in the weight's own. No pass may find the casts of another: a
    graph would read them at the address that they had at capture. So a cast that two calls of units
    share is refused. So is a backward pass under the same autocast if weights are gathered for each
    pass: a later microbatch would use the casts of an earlier one.

Relied on: torch 2.11, ``Node.next_functions``, ``Node._sequence_nr``; every backward pass that is
started from Python goes through ``torch.autograd._engine_run_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_cg.upstream.patch import Undo, put_over
from megatron_cg.upstream.symbols import Symbol

_RUN = Symbol("torch.autograd:_engine_run_backward", "what every backward pass from Python calls")
_NUMBER = Symbol("torch.autograd:_get_sequence_nr", "the number of the next node of this thread")
RELIES_ON = (_RUN, _NUMBER)
_Edge = tuple[Any, int]
Note = Callable[[torch.Tensor | None], None]
Autocast = dict[str, Any]
"""The arguments of a ``torch.autocast``."""
_CAST = (
    "a weight that torch.autocast has cast once, for uses inside and outside (cache_enabled=False "
    "makes it cast for each use)"
)


@dataclass
class _Call:
    """One call of a unit in a forward pass."""

    unit: str
    first: int
    """The number that the first node of the call gets."""
    inputs: Mapping[str, _Edge]
    outputs: Sequence[_Edge] = ()
    last: int = 0
    """The number of the first node after the call."""

    def inside(self, edges: Iterable[_Edge]) -> set[Any]:
        """The nodes of the call that ``edges`` lead to."""
        inside: set[Any] = set()
        ahead = [node for node, _ in edges]
        while ahead:
            node = ahead.pop()
            # Leaves belong to no call.
            if node is None or node in inside or hasattr(node, "variable"):
                continue
            if node._sequence_nr() >= self.first:
                inside.add(node)
                ahead += [following for following, _ in node.next_functions]
        return inside


class Sums:
    """Looks at backward passes of steps: sums across borders of units and, if some vary, inside."""

    def __init__(self, varies: bool) -> None:
        self._varies = varies
        self._calls: list[_Call] = []
        self.shared: dict[str, str] = {}
        """By unit: what is summed across its border, in words."""
        self.autocast: dict[str, Autocast] = {}
        """By device type: around the last backward pass."""
        self.again: dict[str, str] = {}
        """By unit: how a backward pass ran that no graph can run, in words."""
        self._numbers, self._number = count(1), 0
        """Of the backward passes, and of the one that runs."""

    def observe_step(self) -> Undo:
        """Look at every backward pass until the returned function is called."""
        self._calls = []
        original = _RUN.find()

        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            self._look(roots)
            around, self._number = self._number, next(self._numbers)
            try:
                return original(roots, *args, **kwargs)
            finally:
                self._number = around

        return put_over(*_RUN.place(), run)

    def begun(self, unit: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """A forward pass of ``unit`` begins."""
        edges = {name: _edge(given) for name, given in inputs.items() if given.requires_grad}
        self._calls.append(_Call(unit, _NUMBER.find()(), edges))

    def ended(self, unit: str, outputs: Sequence[torch.Tensor]) -> set[int]:
        """It has returned or set these tensors.

        Returns the ids of those that it also uses itself, or was given.
        """
        call = next((call for call in reversed(self._calls) if call.unit == unit), None)
        if call is None or call.outputs:
            return set()
        edges = {id(output): _edge(output) for output in outputs if output.requires_grad}
        call.outputs = list(edges.values())
        call.last = _NUMBER.find()()
        used = {edge for node in call.inside(call.outputs) for edge in node.next_functions}
        used.update(call.inputs.values())
        return {output for output, edge in edges.items() if edge in used}

    def returned(self, unit: str, notes: Iterable[tuple[torch.Tensor, Note]]) -> None:
        """Note the gradients that come for these results of one call, in each backward pass."""
        passes: set[int] = set()
        for tensor, note in notes:
            node, number = _edge(tensor)
            node.register_prehook(partial(self._ran, unit, passes, number, note))

    def _ran(
        self, unit: str, passes: set[int], number: int, note: Note, gradients: Sequence[Any]
    ) -> None:
        note(gradients[number])
        passes.add(self._number)
        if torch.is_grad_enabled():
            self.again[unit] = "with create_graph=True"
        elif len(passes) > 1:
            self.again.setdefault(unit, "twice for one forward pass (retain_graph=True)")

    def _look(self, roots: Any) -> None:
        if not self._calls:
            return
        self.autocast = {kind: autocast_now(kind) for kind in ("cpu", "cuda")}
        users = _users([_edge(root) for root in roots if getattr(root, "requires_grad", True)])
        for call in self._calls:
            what = _crossing(call, users, self._varies)
            if what is not None:
                self.shared.setdefault(call.unit, what)
        # Passes without a backward pass so far may have a later one, together with others.
        self._calls = [c for c in self._calls if not any(e in users for e in c.outputs)]


def _users(roots: Sequence[_Edge]) -> dict[_Edge, list[Any]]:
    """The nodes that give a gradient to each edge of the graph below ``roots``."""
    users: dict[_Edge, list[Any]] = {root: [] for root in roots}
    ahead, seen = [node for node, _ in roots], set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            if edge[0] is not None:
                users.setdefault(edge, []).append(node)
                ahead.append(edge[0])
    return users


def _crossing(call: _Call, users: Mapping[_Edge, Sequence[Any]], varies: bool) -> str | None:
    """What is summed over uses inside and outside of a call, or in varying dtypes; or None."""
    inside = call.inside(edge for edge in call.outputs if edge in users)
    names = {edge: name for name, edge in call.inputs.items()}
    for edge, by in users.items():
        others = [node for node in by if node not in inside]
        count = len(by) - len(others)
        leaf = getattr(edge[0], "variable", None) if varies and count > 1 else None
        if leaf is not None and leaf.grad_dtype not in (None, leaf.dtype):
            return f"{_leaf_name(edge[0])}, used {count} times inside, has another reduce_dtype"
        if not count or not others:
            continue
        # One use of an input or weight that the unit returns gets its gradient by the graph. What
        # it reads besides, the capture refuses.
        returned = edge in call.outputs
        what = names.get(edge) or _leaf_name(edge[0])
        is_cast = what is None and edge[0].name().startswith("ToCopyBackward")
        if is_cast and not (returned and edge[0] in inside):
            return _CAST
        later = sum(node._sequence_nr() >= call.last for node in others)
        if what is not None and count + returned > 1 and later > returned:
            return f"{what}, used {count} times inside and {later} times later outside"
    return None


def _leaf_name(node: Any) -> str | None:
    leaf = getattr(node, "variable", None)
    return None if leaf is None else f"a parameter of shape {tuple(leaf.shape)}"


def _edge(tensor: torch.Tensor | GradientEdge) -> _Edge:
    edge = tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def autocast_now(device_type: str) -> Autocast:
    """The ``torch.autocast`` in which the state of this thread holds, with a cache of its own."""
    enabled = torch.is_autocast_enabled(device_type)
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type) if enabled else None,
        "enabled": enabled,
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
