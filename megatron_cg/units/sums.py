"""Gradients that are summed over uses inside a unit and uses outside of it.

Autograd adds up the gradients of all uses of a tensor in the order in which it meets them. A
graph's backward pass sums the uses inside the unit first, and autograd adds only that sum to the
others. If uses outside of the unit come later in the forward pass, their gradients come earlier,
and with two uses inside the order of additions is another one: the last bits differ. So the graphs
of autograd of the steps before capture are looked at, and such a unit is refused. If such a use is
new in a backward pass of replays, that raises: see :class:`Later`.

Note [Casts that autocast caches]
    With its cache, autocast casts a weight once in a forward pass, so gradients of all its uses are
    summed in the lower precision. A unit is captured with the cache that it was seen with, since
    without one they would be summed in the weight's own. No pass may find the casts of another: a
    graph would read them at the address that they had at capture. So a cast that two calls of units
    share is refused. So is a backward pass under the same autocast if weights are gathered for each
    pass: a later microbatch would use the casts of an earlier one.

Relied on: torch 2.11, ``Node.next_functions``, ``Node._sequence_nr``; every backward pass that is
started from Python goes through ``torch.autograd._engine_run_backward``, whose fifth argument are
the tensors whose gradients are asked for.

Note [Separate inputs]
    With ``separate_inputs=True`` each call takes its arguments through views, eager passes too. A
    view sums the uses inside and passes on one gradient, as a replay does, at the same place in the
    order of autograd's nodes. So numbers are those of eager training with these views.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize, ref

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_cg.replay.borders import PassedOn
from megatron_cg.replay.guard import Mismatch
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.patch import Undo, replace_function
from megatron_cg.upstream.symbols import Symbol

_RUN = Symbol("torch.autograd:_engine_run_backward", "what every backward pass from Python calls")
_NUMBER = Symbol("torch.autograd:_get_sequence_nr", "the number of the next node of this thread")
_HOOKED = Symbol("torch.nn.modules._functions:BackwardHookFunction", "what a backward hook inserts")
RELIES_ON = (_RUN, _NUMBER, _HOOKED)
_Edge = tuple[Any, int]
Note = Callable[[torch.Tensor | None], None]
Autocast = dict[str, Any]
"""The arguments of a ``torch.autocast``."""
_DEVICES = ("cpu", "cuda")
_INPUTS = 3  # Where a backward pass gets the tensors whose gradients it returns.
_CAUSE = "Autograd sums the gradients of all uses one by one, and a graph its own first. "
_READ = (
    "a result that it also uses itself, whose gradient is read or hooked outside",
    "read the gradient of a view that the loss uses instead (y = y.view_as(y) outside of the unit)",
)
_CAST = (
    "a weight that torch.autocast has cast once, for uses inside and outside",
    "enter torch.autocast with cache_enabled=False, which casts it for each use",
)
_ARGUMENT = (
    "pass separate_inputs=True to graph_units: units then take their arguments through views, and "
    "train as eager training with these views does. If it is passed already, the unit has this "
    "tensor in another way too, as its own weight or in a dataclass: give it in one way"
)
_WEIGHT = "use it once in the unit (w = w.view_as(w) in its forward)"


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
    several: set[Any] = field(default_factory=set)
    """The names of inputs, and the weights, that it uses several times."""
    cast: set[Any] | None = None
    """Those that it casts, if autocast keeps casts."""
    replayed: bool = False
    """Whether a replay was it, which is one node that uses each once."""
    uses_results: bool = False

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
        self._used: dict[_Edge, tuple[str, _Shared]] = {}
        """By the edge of its view: a result that a unit uses itself."""
        self.shared: dict[str, tuple[str, str]] = {}
        """By unit: what is summed across its border, and what to do, in words."""
        self.seen: dict[str, _Call] = {}
        """By unit, its last call."""
        self.autocast: dict[str, Autocast] = {}
        """By device type: around the last backward pass."""
        self.again: dict[str, str] = {}
        """By unit: how a backward pass ran that no graph can run, in words."""
        self._numbers, self._number = count(1), 0
        """Of the backward passes, and of the one that runs."""

    def observe_step(self) -> Undo:
        """Look at every backward pass until the returned function is called."""
        self._calls, self._used = [], {}
        original = _RUN.find()

        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = self._look(roots, args[_INPUTS] or (), kwargs.get("accumulate_grad", False))
            args = (*args[:_INPUTS], inputs, *args[_INPUTS + 1 :])
            around, self._number = self._number, next(self._numbers)
            try:
                return original(roots, *args, **kwargs)
            finally:
                self._number = around

        return replace_function(*_RUN.place(), run)

    def begun(self, unit: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """A forward pass of ``unit`` begins."""
        edges = {name: _edge(given) for name, given in inputs.items() if given.requires_grad}
        keeps = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, _DEVICES))
        call = _Call(unit, _NUMBER.find()(), edges, cast=set() if keeps else None)
        self._calls.append(call)

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
        own = {output for output, edge in edges.items() if edge in used}
        call.uses_results = bool(own)
        return own

    def returned(
        self,
        unit: str,
        notes: Iterable[tuple[torch.Tensor, Note]],
        used: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Note the gradients that come for these results of one call, in each backward pass.

        ``used`` are the views of those that the unit uses itself, each with the result.
        """
        for view, own in used:
            self._used[_edge(view)] = unit, _Shared(view, own)
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

    def _look(self, roots: Any, inputs: Sequence[Any], accumulates: bool) -> tuple[Any, ...]:
        """Look at a pass that begins; returns the tensors whose gradients it must compute."""
        if not (self._calls or self._used):
            return tuple(inputs)
        asked = list(inputs)
        for index, given in enumerate(inputs):
            known = getattr(given, "requires_grad", True) and self._used.get(_edge(given))
            if known:
                unit, one = known
                asked[index] = one.own
                one.retains = one.retains or accumulates
                self.shared.setdefault(unit, _READ)
        for unit, one in self._used.values():
            if one.observers_moved():
                self.shared.setdefault(unit, _READ)
        if self._calls:
            self.autocast = {kind: autocast_now(kind) for kind in _DEVICES}
        users = _users(roots)
        for call in self._calls:
            what = _crossing(call, users, self._varies)
            self.seen[call.unit] = replace(call, inputs={}, outputs=())
            if what is not None:
                self.shared.setdefault(call.unit, what)
        # Passes without a backward pass so far may have a later one, together with others.
        self._calls = [c for c in self._calls if not any(e in users for e in c.outputs)]
        # Who still has a view may ask again, in another pass.
        kept = ((e, one) for e, one in self._used.items() if e not in users or one[1].is_alive)
        self._used = dict(kept)
        return tuple(asked)


class _Shared:
    """A result that a unit uses itself, and the view of it that the caller has.

    The gradient of the view is that from outside. Who asks for the caller's gets that of the
    result, as without the view.
    """

    def __init__(self, view: torch.Tensor, own: torch.Tensor) -> None:
        self.own, self._view = own, ref(view)
        view.register_hook(lambda _: None).remove()
        self._hooks: Any = view._backward_hooks
        """They may outlive it."""
        self.retains = False
        """Whether the view gets the gradient as its attribute, as non-leaf tensors can."""
        self._retained: torch.Tensor | None = None
        self._is_retained = False

    @property
    def is_alive(self) -> bool:
        return self._view() is not None

    def observers_moved(self) -> bool:
        """Let what observes the view's gradient observe the result's; whether there is any."""
        # FSDP2 has hooks on all that its modules return, and reads no gradient there.
        own = [key for key, h in self._hooks.items() if "torch.distributed" not in str(h)]
        for key in own:
            self.own.register_hook(self._hooks.pop(key))
        self.retains = self.retains or getattr(self._view(), "retains_grad", False)
        if self.retains and not self._is_retained:
            self._is_retained = True
            self.own.register_hook(self._retain)
        return bool(own) or self.retains

    def _retain(self, gradient: torch.Tensor) -> None:
        view, before = self._view(), self._retained
        self._retained = gradient.clone() if before is None else before + gradient
        if view is not None:
            view.grad = self._retained


class Later:
    """Looks for uses that are new since the capture, as a backward pass of replays begins.

    It looks at all nodes of autograd, so only if there are others between the replays, or behind
    the last ones, and in each fiftieth pass. ``inputs`` are those of each unit's graph, in its
    order; ``waiting`` returns the nodes of replays by unit.
    """

    def __init__(
        self,
        seen: Mapping[str, _Call],
        inputs: Mapping[str, Sequence[str]],
        waiting: Callable[[], Mapping[str, Any]],
        found: Callable[[Mismatch, str], None],
    ) -> None:
        self._seen, self._inputs, self._waiting, self._found = seen, inputs, waiting, found
        self._last = self._passes = 0
        self._fine: set[tuple[Any, ...]] = set()

    def observe(self) -> Undo:
        """Look at backward passes until the returned function is called, or the model is freed."""
        original, number, here = _RUN.find(), _NUMBER.find(), ref(self)

        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            later = here()  # torch's function must not keep a model that is dropped
            if later is None or not later._begun(roots, args[_INPUTS] or (), number()):
                return original(roots, *args, **kwargs)
            try:
                return original(roots, *args, **kwargs)
            finally:
                later._last = number()

        self._undo = finalize(self, replace_function(*_RUN.place(), run))
        self._undo.atexit = False
        return self._stop

    def _stop(self) -> None:
        self._undo()

    def _begun(self, roots: Any, inputs: Sequence[Any], number: int) -> bool:
        """Whether a backward pass of replays begins; looks at it if it may have new uses."""
        replays = {node: unit for unit, node in self._waiting().items()}
        if not replays or in_backward_pass():
            return False
        places = (node._sequence_nr() - self._last for node in replays)
        key = (number - self._last, *places, *_shape(_edges(roots), replays))
        for given, _ in _edges(inputs):
            node = given
            while _is_own(node):
                node = node.next_functions[0][0]
            unit = replays.get(node, "")
            if unit in self._seen and self._seen[unit].uses_results:
                self._refuse(_READ, unit)
        self._passes += 1
        if key not in self._fine or self._passes % 50 == 0:
            self._look(_users(roots), replays)
            self._fine = {key, *self._fine} if len(self._fine) < 99 else {key}
        return True

    def _look(self, users: Mapping[_Edge, Sequence[Any]], replays: Mapping[Any, str]) -> None:
        reached = {node for by in users.values() for node in by}
        for node, unit in replays.items():
            if node not in reached or unit not in self._seen:
                continue
            inputs, first, last = dict[str, _Edge](), node._sequence_nr(), node._sequence_nr() + 1
            for name, following in zip(self._inputs[unit], node.next_functions, strict=False):
                edge = following
                while _is_own(edge[0]):
                    first = min(first, edge[0]._sequence_nr())
                    edge = edge[0].next_functions[0]
                inputs[name] = edge
            outputs = [edge for edge in users if edge[0] is node]
            seen = replace(self._seen[unit], inputs=inputs, outputs=outputs, replayed=True)
            what = _crossing(replace(seen, first=first, last=last), users, varies=False)
            if what is not None:
                self._refuse(what, unit)

    def _refuse(self, found: tuple[str, str], unit: str) -> None:
        subject, (what, remedy) = "what is summed with gradients from outside", found
        cause = f"{_CAUSE}From the first step on, {remedy}. Or leave the unit out of units."
        self._found(Mismatch("sharing", subject, "something else", what, cause), unit)


def _shape(edges: list[_Edge], replays: Mapping[Any, str]) -> Iterator[Any]:
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


def _edges(roots: Sequence[Any]) -> list[_Edge]:
    return [_edge(root) for root in roots if getattr(root, "requires_grad", True)]


def _users(roots: Sequence[Any]) -> dict[_Edge, list[Any]]:
    """The nodes that give a gradient to each edge of the graph below ``roots``."""
    users: dict[_Edge, list[Any]] = {edge: [] for edge in _edges(roots)}
    ahead, seen = [node for node, _ in users], set()
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


def _crossing(
    call: _Call, users: Mapping[_Edge, Sequence[Any]], varies: bool
) -> tuple[str, str] | None:
    """What is summed over uses inside and outside of a call, or in varying dtypes; or None.

    With what to do instead. Adds to what the call uses several times, and casts.
    """
    inside = call.inside(edge for edge in call.outputs if edge in users)
    names = {edge: name for name, edge in call.inputs.items()}
    for edge, by in users.items():
        if call.replayed and len(by) < 2:
            continue
        others = [node for node in by if node not in inside]
        count = len(by) - len(others)
        leaf: Any = getattr(edge[0], "variable", None)
        key, returned = names.get(edge, leaf), edge in call.outputs
        unhooked = _unhooked(edge, users, inside)
        uses = [node for one in unhooked for node in users.get(one, ()) if not _is_hooked(node)]
        if sum(node in inside for node in uses) + sum(one in call.outputs for one in unhooked) > 1:
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
        if what is not None and is_several and later > returned:
            times = "several" if call.replayed else count
            said = f"{what}, used {times} times inside and {later} times later outside"
            return said, _ARGUMENT if edge in names else _WEIGHT
    return None


def _unhooked(edge: _Edge, users: Mapping[_Edge, Sequence[Any]], inside: set[Any]) -> list[_Edge]:
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


def _is_cast(node: Any) -> bool:
    return bool(node.name().startswith("ToCopyBackward"))


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
