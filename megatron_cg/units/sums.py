"""Gradients that are summed over uses inside a unit and uses outside of it.

Autograd adds up the gradients of all uses of a tensor in the order in which it meets them. A
graph's backward pass adds up those inside the unit first. Gradients of later uses outside come
earlier, and with two uses inside the last bits of the sum differ. So the graphs of autograd of the
steps before capture are looked at, and such a unit is refused. If such a use is new in a backward
pass of replays, that raises: see :class:`Later`.

Note [Casts that autocast caches]
    With its cache, autocast casts a weight once in a forward pass, so gradients of all uses are
    summed in the lower precision. So a unit is captured with the cache that it was seen with. A
    graph would hold the addresses of the casts of another pass: a cast that two calls of units
    share is refused. No pass may find the casts of another: a backward pass under the same autocast
    is refused if weights are gathered for each pass.

Relied on: torch 2.11, ``Node.next_functions``, ``Node._sequence_nr``; every backward pass that is
started from Python goes through ``RUN_BACKWARD``.

Note [Results that are views]
    After a write into a view, gradients come to what it is a view of, by the node of the write, and
    to the view no more. A replay gives a tensor that is no view. Both are the same if that tensor
    has no other use, and if the view is all of it or it is contiguous, as a gradient of zeros is
    made. A view of an argument or of another result shares memory with it, and no result of a
    replay does. So who writes into any of them is told.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch

from megatron_cg.replay.borders import (
    CURRENT_PASS,
    INPUTS,
    RUN_BACKWARD,
    Edge,
    PassedOn,
    edge_of,
    edges_of,
    in_backward_pass,
    users_of,
)
from megatron_cg.replay.guard import Mismatch, autocast_of
from megatron_cg.units.layouts import READ, WRITTEN, GradStrides, Note, ObservedResult
from megatron_cg.upstream.patch import Undo, combine_undos, run_instead, undone_after
from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:
    from megatron_cg.units.module_unit import ModuleUnit

_NUMBER = Symbol("torch.autograd:_get_sequence_nr", "the number of the next node of this thread")
_HOOKED = Symbol("torch.nn.modules._functions:BackwardHookFunction", "what a backward hook inserts")
RELIES_ON = (RUN_BACKWARD, _NUMBER, _HOOKED)
Autocast = dict[str, Any]
"""The arguments of a ``torch.autocast``."""
_DEVICES = ("cpu", "cuda")
_CAUSE = "Autograd sums the gradients of all uses one by one, and a graph its own first. "
_MEMORY = "Results of a replay share no memory with its arguments or, for autograd, with others. "
_PART = (
    "those of some tensors alone (torch.autograd.grad, or inputs= of backward)",
    "call loss.backward(), or let the pass inside return its gradients (torch.autograd.grad)",
)
_CAST = (
    "a weight that torch.autocast has cast once, for uses inside and outside",
    "enter torch.autocast with cache_enabled=False, which casts it for each use",
)
_ARGUMENT = (
    "pass separate_inputs=True to graph_units: units then take their arguments through views, and "
    "train as eager training with these views does. If it is passed already, the unit has this "
    "tensor in another way too, as its own weight: give it in one way"
)
_WEIGHT = "use it once in the unit (w = w.view_as(w) in its forward)"


@dataclass
class _Call:
    """One call of a unit in a forward pass."""

    unit: str
    first: int
    """The number that the first node of the call gets."""
    inputs: Mapping[str, Edge]
    outputs: Sequence[Edge] = ()
    bases: dict[Edge, bool] = field(default_factory=dict)
    """What it makes and returns views of; see Note [Results that are views]. And whether a write
    changes no sum and no strides."""
    last: int = 0
    """The number of the first node after the call."""
    several: set[Any] = field(default_factory=set)
    """The names of inputs, and the weights, that it uses several times."""
    cast: set[Any] | None = None
    """Those that it casts, if autocast keeps casts."""
    replayed: bool = False
    """Whether a replay was it, which is one node that uses each once."""
    uses_results: bool = False

    def inside(self, edges: Iterable[Edge]) -> set[Any]:
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
        self._used: dict[Edge, ObservedResult] = {}
        self.shared: dict[str, tuple[str, str]] = {}
        """By unit: what is summed across its border, and what to do, in words."""
        self.seen: dict[str, _Call] = {}
        """By unit, its last call."""
        self.autocast: dict[str, Autocast] = {}
        """By device type: around the last backward pass."""
        self.again: dict[str, str] = {}
        """By unit: how a backward pass ran that no graph can run, in words."""

    def observe_step(self) -> Undo:
        """Look at every backward pass until the returned function is called."""

        def run(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
            with undone_after(combine_undos(self._look(roots, args[0], args[INPUTS] or ()))):
                return original(roots, *args, **kwargs)

        return combine_undos((self._forget, run_instead(RUN_BACKWARD, run)))

    def _forget(self) -> None:
        """Keep no node of autograd, and so nothing that it keeps, behind a step."""
        self._calls, self._used = [], {}

    def begun(self, unit: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """A forward pass of ``unit`` begins."""
        edges = {name: edge_of(given) for name, given in inputs.items() if given.requires_grad}
        keeps = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _DEVICES))
        call = _Call(unit, _NUMBER.find()(), edges, cast=set() if keeps else None)
        self._calls.append(call)

    def ended(
        self, unit: str, results: Mapping[int, torch.Tensor], gradients: dict[Any, GradStrides]
    ) -> set[int]:
        """It has made and returned these tensors, by number; ``gradients`` get what comes for them.

        Returns the ids of those that nobody may write into.
        """
        call = next((call for call in reversed(self._calls) if call.unit == unit), None)
        if call is None or call.outputs:
            return set()
        edges = {id(one): edge_of(one) for one in results.values() if one.requires_grad}
        call.outputs = list(edges.values())
        call.last = _NUMBER.find()()
        inside = call.inside(call.outputs)
        uses = Counter(edge for node in inside for edge in node.next_functions)
        own = {output for output, edge in edges.items() if edge in uses}
        call.uses_results = bool(own)
        unwritten = set()
        for one in results.values():
            base: Any = one._base
            if id(one) not in edges or not _is_view(one) or edge_of(base)[0] not in inside:
                continue
            is_whole = one.numel() == base.numel() or base.is_contiguous()
            call.bases[edge_of(base)] = is_free = uses[edge_of(base)] < 2 and is_whole
            unwritten |= set() if is_free else {id(one)}
        passes: set[int] = set()
        for number, one in results.items():
            if id(one) not in edges or one.is_leaf:
                continue
            edge = edges[id(one)]
            seen = gradients.setdefault(number, GradStrides(f"result {number}"))
            seen.begin(one, is_used=id(one) in own)
            notes: list[Note] = [(seen.inside or seen).note]
            if seen.inside is not None:
                used = ObservedResult(unit, one, seen.note, call.last)
                self._used[edge], notes = used, [*notes, used.end]
            edge[0].register_prehook(partial(self._ran, unit, passes, edge[1], notes))
            if _is_view(one) and (base := edge_of(one._base)) in call.bases:  # type: ignore[arg-type]
                base[0].register_prehook(partial(self._ran, unit, passes, base[1], ()))
        return unwritten

    def _ran(
        self,
        unit: str,
        passes: set[int],
        number: int,
        notes: Iterable[Note],
        gradients: Sequence[Any],
    ) -> None:
        for note in notes:
            note(gradients[number])
        passes.add(CURRENT_PASS.cached())
        if torch.is_grad_enabled():
            self.again[unit] = "with create_graph=True"
        elif len(passes) > 1:
            self.again.setdefault(unit, "twice for one forward pass (retain_graph=True)")

    def _look(
        self, roots: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any]
    ) -> Iterator[Undo]:
        """Look at a pass that begins, with these gradients of its roots."""
        if not (self._calls or self._used):
            return
        asked = {*edges_of(inputs)}
        for edge, one in self._used.items():
            if edge in asked or one.is_found():
                self.shared.setdefault(one.unit, READ)
        if self._calls:
            self.autocast = {kind: autocast_now(kind) for kind in _DEVICES}
        users = users_of(roots)
        for call in self._calls:
            what = _crossing(call, users, users, self._varies)
            self.seen[call.unit] = replace(call, inputs={}, outputs=(), bases={})
            if what is not None:
                self.shared.setdefault(call.unit, what)
        # Passes without a backward pass so far may have a later one, together with others.
        self._calls = [c for c in self._calls if users.keys().isdisjoint((*c.outputs, *c.bases))]
        for edge, one in self._used.items():
            yield from one.observe(edge, users.get(edge, ()))
            for root, gradient in zip(roots, gradients, strict=True):
                if getattr(root, "requires_grad", True) and edge_of(root) == edge:
                    one.add(gradient)
        # Who still has a result may ask again, in another pass.
        kept = ((e, one) for e, one in self._used.items() if e not in users or one.is_alive)
        self._used = dict(kept)


class Later:
    """Looks for uses that are new since the capture, as a backward pass of replays begins.

    It looks at all nodes of autograd, so only if there are others between the replays, or behind
    the last ones, and in each twentieth pass. ``waiting`` returns the nodes of replays by unit.
    """

    def __init__(
        self,
        seen: Mapping[str, _Call],
        units: "Iterable[ModuleUnit]",
        waiting: Callable[[], Mapping[str, Any]],
        found: Callable[[Mismatch, str], None],
    ) -> None:
        self._seen, self._waiting, self._found = seen, waiting, found
        self._units = {unit.name: unit for unit in units}
        self._last = self._own = self._passes = 0
        self._fine: set[tuple[Any, ...]] = set()

    def observe(self) -> Undo:
        """Look at backward passes until the returned function is called, or the model is freed."""
        number, here = _NUMBER.find(), ref(self)

        def run(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
            later = here()  # torch's function must not keep a model that is dropped
            if later is None or not later._begun(roots, args[INPUTS] or (), number()):
                return original(roots, *args, **kwargs)
            try:
                return original(roots, *args, **kwargs)
            finally:
                later._last, later._own = number(), PassedOn.made

        self._undo = finalize(self, run_instead(RUN_BACKWARD, run))
        self._undo.atexit = False
        return self._stop  # Not the undo alone: the session keeps this object by it.

    def _stop(self) -> None:
        self._undo()

    def end_step(self) -> None:
        """Look for writes of a step whose passes had no backward pass, or have none any more."""
        waiting = self._waiting()
        for unit in self._units.keys() - waiting.keys():
            watched = self._units[unit].watched
            if any(one.shares and one.is_found() for one in watched):
                self._refuse(WRITTEN, unit)
            watched.clear()

    def _begun(self, roots: Any, inputs: Sequence[Any], number: int) -> bool:
        """Whether a backward pass of replays begins; looks at it if it may have new uses."""
        replays = {node: unit for unit, node in self._waiting().items()}
        if not replays or in_backward_pass():
            return False
        places = (node._sequence_nr() - self._last for node in replays)
        # A node of this package may come where one of the caller's own has gone.
        made = number - self._last, PassedOn.made - self._own
        key = (*made, *places, *_shape(edges_of(roots), replays))
        for given, _ in edges_of(inputs):
            node = given
            while _is_own(node):
                node = node.next_functions[0][0]
            unit = replays.get(node, "")
            if unit in self._seen and self._seen[unit].uses_results:
                self._refuse(READ, unit)
        for unit in replays.values():
            for one in self._units[unit].watched:
                if one.is_found():
                    self._refuse(one.found, unit)
        nested = inputs and {node for node, unit in replays.items() if self._units[unit].nested}
        if nested and (found := nested.intersection(node for node, _ in users_of(roots))):
            self._refuse(_PART, replays[found.pop()])
        self._passes += 1
        if key not in self._fine or self._passes % 20 == 0:
            self._look(users_of(roots), replays)
            self._fine = {key, *self._fine} if len(self._fine) < 99 else {key}
        return True

    def _look(self, users: Mapping[Edge, Sequence[Any]], replays: Mapping[Any, str]) -> None:
        reached: dict[Any, list[Edge]] = {}
        for edge in users:
            reached.setdefault(edge[0], []).append(edge)
        several = [edge for edge, by in users.items() if len(by) > 1]
        for node, unit in replays.items():
            if node not in reached or unit not in self._seen:
                continue
            inputs, first = dict[str, Edge](), node._sequence_nr()
            names = self._units[unit].inputs
            for name, following in zip(names, node.next_functions, strict=False):
                edge = following
                while _is_own(edge[0]):
                    first = min(first, edge[0]._sequence_nr())
                    edge = edge[0].next_functions[0]
                inputs[name] = edge
            call = replace(self._seen[unit], inputs=inputs, outputs=reached[node], first=first)
            call.last, call.replayed = node._sequence_nr() + 1, True
            what = _crossing(call, users, several, varies=False)
            if what is not None:
                self._refuse(what, unit)

    def _refuse(self, found: tuple[str, str], unit: str) -> None:
        what, remedy = found
        subject, cause = "what is summed with gradients from outside", _CAUSE
        if found is _PART:
            subject = "which gradients a backward pass computes"
            cause = "A pass inside its own adds to gradients of weights, and no replay does. "
        if found is WRITTEN:
            subject, cause = "what is done with its results and arguments outside", _MEMORY
            what = "a write into memory that they share with each other or with its own tensors"
        cause = f"{cause}From the first step on, {remedy}. Or leave the unit out of units."
        self._found(Mismatch("sharing", subject, "something else", what, cause), unit)


def _shape(edges: list[Edge], replays: Mapping[Any, str]) -> Iterator[Any]:
    """The first nodes behind the last replays, by name, and leaves."""
    ahead = [node for node, _ in edges]
    for _ in range(64):
        if not ahead:
            return
        node = ahead.pop()
        if node is not None:
            yield replays.get(node) or node.name()
            yield id(getattr(node, "variable", None))
            ahead += [one for one, _ in node.next_functions] if node not in replays else ()


def _crossing(
    call: _Call, users: Mapping[Edge, Sequence[Any]], edges: Iterable[Edge], varies: bool
) -> tuple[str, str] | None:
    """What of ``edges`` is summed over uses inside and outside of a call, or in varying dtypes.

    With what to do instead; or None. Adds to what the call uses several times, and casts.
    """
    inside = call.inside(edge for edge in (*call.outputs, *call.bases) if edge in users)
    names = {edge: name for name, edge in call.inputs.items()}
    for edge in edges:
        others = [node for node in users[edge] if node not in inside]
        count = len(users[edge]) - len(others)
        if edge in call.bases and others:
            if call.bases[edge]:
                continue
            return WRITTEN
        leaf: Any = getattr(edge[0], "variable", None)
        key, returned = names.get(edge, leaf), edge in call.outputs and edge not in names
        unhooked = _unhooked(edge, users, inside)
        uses = [node for one in unhooked for node in users.get(one, ()) if not _is_hooked(node)]
        own = [one for one in call.outputs if one not in names]  # A replay returns its arguments.
        if sum(node in inside for node in uses) + sum(one in own for one in unhooked) > 1:
            call.several.add(key)
        # An earlier call may have cast it, such as that of another microbatch.
        casts = (n for n in uses if call.cast is not None and _is_cast(n))
        if any(not inside.isdisjoint((node, *users.get((node, 0), ()))) for node in casts):
            call.cast.add(key)  # type: ignore[union-attr]
        is_varied = varies and count > 1 and leaf is not None
        if is_varied and leaf.grad_dtype not in (None, leaf.dtype):
            said = f"{_leaf_name(edge[0])}, used {count} times inside, has another reduce_dtype"
            return said, _WEIGHT
        if not count or not others:
            continue
        # One use of an input or weight that the unit returns gets its gradient by the graph. What
        # it reads besides, the capture refuses.
        what = names.get(edge) or _leaf_name(edge[0])
        is_cast = what is None and _is_cast(edge[0])
        if call.replayed and leaf is not None and call.cast and key in call.cast:
            is_cast = any(map(_is_cast, others))  # Those of the unit are in its graph.
        if is_cast and not (returned and edge[0] in inside):
            return _CAST
        later = sum(node._sequence_nr() >= call.last for node in others)
        is_several = key in call.several if call.replayed else count + returned > 1
        if what is not None and is_several and later:
            times = "several" if call.replayed else count
            said = f"{what}, used {times} times inside and {later} times later outside"
            return said, _ARGUMENT if edge in names else _WEIGHT
    return None


def _unhooked(edge: Edge, users: Mapping[Edge, Sequence[Any]], inside: set[Any]) -> list[Edge]:
    """The edge, and what full backward hooks of modules in a call make of it.

    If such hooks are removed later, uses of those are uses of the edge.
    """
    edges = [edge]
    for one in edges:
        hooked = {node for node in users.get(one, ()) if node in inside and _is_hooked(node)}
        edges += [(n, i) for n in hooked for i, e in enumerate(n.next_functions) if e == one]
    return edges


def _is_hooked(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is _HOOKED.cached


def _is_own(node: Any) -> bool:
    """Whether it is a node of this package between a replay and what its caller has."""
    return issubclass(getattr(node, "_forward_cls", object), PassedOn)


def _is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd has a node for what it is a view of."""
    base = tensor._base
    return base is not None and base.grad_fn is not None


def _is_cast(node: Any) -> bool:
    return bool(node.name().startswith("ToCopyBackward"))


def _leaf_name(node: Any) -> str | None:
    leaf = getattr(node, "variable", None)
    return None if leaf is None else f"a parameter of shape {tuple(leaf.shape)}"


def autocast_now(device_type: str) -> Autocast:
    """The ``torch.autocast`` in which the state of this thread holds, with a cache of its own."""
    dtype = autocast_of(device_type)
    return {
        "device_type": device_type,
        "dtype": dtype,
        "enabled": dtype is not None,
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
