"""Weights of graphs, detached from autograd.

A graph's backward replay computes the gradients of all its weights at once. The backend returns
copies of them, autograd runs a node and a hook for each, and they are copied once more, into
Megatron-FSDP's bucket. Here a replay runs without its weights among autograd's inputs, and passes
all their gradients on in one call, which copies them from the graph's own memory into the bucket
(Note [Borrowed gradients] in ``replay/guarded_graph.py``). Only if a weight is also used in
another way, they are copied out of the graph's memory first.

Note [What autograd would have done]
    Autograd sums the gradients from all uses of a weight in one backward pass, and only then calls
    the weight's hook. Another use may be a replay of another microbatch, or anything else that
    reads a weight, such as a penalty on weights. The engine tells which uses a backward pass
    reaches (``_will_engine_execute_node``). So gradients of replays wait for the last replay. If
    there is another use, whichever comes first waits for the other. A sum of two terms does not
    depend on their order. Three or more may be added in another order than autograd's. The engine's
    number of a pass identifies it; one inside another (reentrant recompute) has its own.
    A weight with hooks of its own is not detached.

Note [Passes that name their inputs]
    ``torch.autograd.grad``, or ``backward`` with ``inputs``, computes gradients of some tensors
    only. In a replay nothing tells whether detached weights are among them. So it has one more
    input, a leaf that no caller can name. A pass that does not reach the leaf ends with an error.
    One that names only what the replay has detached does not come to the replay: it ends with the
    error as it begins.

Note [Nodes that are kept]
    A weight has one AccumulateGrad node as long as something refers to it. Otherwise each query
    creates one, which costs thirty times as much. So the nodes are kept. If a weight still gets
    another node, its own hook runs after its gradient was taken, and the pass ends with an error
    (``GradientBucketing``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron_cg.errors import WITHOUT_FAST_PATH, FastPathError, say
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.replay.borders import (
    CURRENT_PASS,
    INPUTS,
    NO_PASS,
    RUN_BACKWARD,
    edges_of,
    in_backward_pass,
    users_of,
)
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.upstream.patch import Undo, combined_undo, run_instead
from megatron_cg.upstream.symbols import Symbol

_EXECUTES = Symbol("torch._C:_will_engine_execute_node", "what a backward pass comes to")
RELIES_ON = (_EXECUTES, CURRENT_PASS, RUN_BACKWARD)
_NAMED = (
    "A backward pass that names its inputs, as torch.autograd.grad does, comes to a graph. The "
    "FSDP fast path has detached its weights from autograd, and cannot give gradients to those "
    "alone that the pass names. To mend this, "
)


class Taker(Protocol):
    """What takes the gradients of detached weights: :class:`.GradientBucketing`, or that of v2."""

    def knows(self, parameter: object) -> bool: ...

    def detach(self, weights: Sequence[nn.Parameter], to_come: Callable[[], bool]) -> Any: ...

    def attach(self, operation: Any) -> None: ...

    def take_detached(
        self, operation: Any, gradients: list[torch.Tensor | None], used: Sequence[bool]
    ) -> None: ...


@combined_undo
def detach_in_graphs(
    detached: DetachedWeights, replays: Sequence[ReplayFunction], launched: Callable[[], None]
) -> Iterator[Undo]:
    """Detach the weights of graphs from autograd.

    ``replays`` says how autograd sees each graph. ``launched`` is called after each forward replay.

    Raises NotApplicableError if there are no graphs, and UpstreamChangedError if torch is another.
    """
    if not replays:
        raise NotApplicableError("there are no graphs")
    for symbol in RELIES_ON:  # Now, and not in the first replay.
        symbol.find()
    yield detached.close
    yield detached.look_at_passes()
    for replay in replays:
        replacement = _Replacement(replay, detached, launched)
        yield replay.replace(replacement)
        yield replacement.end


class _Replacement:
    """Called instead of a graph's autograd function. All but ``apply`` is the function's own.

    ``detached`` selects the weights that can be detached, and is not kept alive.
    """

    def __init__(
        self, replay: ReplayFunction, detached: DetachedWeights, launched: Callable[[], None]
    ) -> None:
        self._replay, self._launched = replay, launched
        self._function, self._first = replay.function, replay.first_weight
        self._detached: Callable[[], DetachedWeights | None] = weakref.ref(detached)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_function"], name)

    def end(self) -> None:
        """Detach nothing any more, even if something still refers to this object."""
        self._detached = self._launched = lambda: None

    def apply(self, *args: Any) -> Any:
        tail = args[self._first :]
        detached = self._detached() if torch.is_grad_enabled() else None
        weights = None if detached is None else detached.together(tail)
        if weights is None:
            outputs = self._function.apply(*args)
        else:
            apply: Callable[..., Any] = _Detached.apply
            outputs = apply(self, weights, tail, *args[: self._first], weights.leaf)
        self._launched()
        return outputs

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Return gradients in the graph's own memory; see :class:`.ReplayFunction`."""
        end_borrowing = self._replay.borrow()
        try:
            return self._function.backward(ctx, *gradients)
        finally:
            end_borrowing()


class _Detached(torch.autograd.Function):
    """Calls the function with weights that autograd does not get."""

    @staticmethod
    def forward(
        ctx: Any,
        function: _Replacement,
        weights: DetachedParams,
        tail: Sequence[Any],
        *head_and_leaf: Any,
    ) -> Any:
        head = head_and_leaf[:-1]
        ctx.call, ctx.computed_in = (function, weights, len(head)), NO_PASS
        ctx.detached = weights.edges  # for ``users_of``
        weights.is_used_by(ctx)
        return function.forward(ctx, *head, *tail)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function, weights, head = ctx.call
        computed = function.backward(ctx, *gradients)
        weights.computed(ctx, computed[head:])
        return (None, None, None, *computed[:head], None)


class DetachedWeights:
    """The detached weights of one model's graphs."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._of: dict[int, DetachedParams] = {}

    def together(self, tail: Sequence[Any]) -> DetachedParams | None:
        """The weights in the last arguments of a replay; None: they stay attached to autograd."""
        if not tail or not torch.is_tensor(tail[0]):
            return None
        weights = self._of.get(id(tail[0]))
        if weights is not None and not weights.are(tail):
            if weights.calls:
                return None  # its calls and this one may belong to one pass
            self._of.pop(id(tail[0])).close()
            weights = None
        weights = weights or self._add(tail)
        return weights if weights is not None and weights.may_be_detached() else None

    def look_at_passes(self) -> Undo:
        """Refuse backward passes that name weights, until the returned function is called."""
        here = weakref.ref(self)  # torch's function must not keep a model that is dropped

        def run(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
            if args[INPUTS] and (detached := here()) is not None:
                detached._refuse_named(roots, args[INPUTS])
            return original(roots, *args, **kwargs)

        return run_instead(RUN_BACKWARD, run)

    def _refuse_named(self, roots: Sequence[Any], named: Sequence[Any]) -> None:
        ids = {id(getattr(node, "variable", None)) for node, _ in edges_of(named)}
        own = [w for w in self._of.values() if not ids.isdisjoint(map(id, w.parameters))]
        calls = {node for weights in own for node in weights.calls}
        if calls and not calls.isdisjoint(node for node, _ in users_of(roots)):
            raise FastPathError(_NAMED + say(WITHOUT_FAST_PATH))

    def close(self) -> None:
        for weights in self._of.values():
            weights.close()
        self._of.clear()

    def _add(self, tail: Sequence[Any]) -> DetachedParams | None:
        needed = [place for place, needs in enumerate(_needs(tail)) if needs]
        if not needed or not all(self._taker.knows(tail[place]) for place in needed):
            return None
        ids = {id(tail[place]) for place in needed}
        if len(ids) < len(needed):
            return None
        if not ids.isdisjoint(id(p) for other in self._of.values() for p in other.parameters):
            return None  # another unit's weights; their own hooks wait for that unit's graph
        weights = DetachedParams(tail, needed, self._taker)
        self._of[id(tail[0])] = weights
        return weights


class DetachedParams:
    """Weights of one unit's graphs, and their state in a backward pass."""

    def __init__(self, tail: Sequence[Any], needed: list[int], taker: Taker) -> None:
        self._places, self._taker = needed, taker
        self._needs = _needs(tail)
        self.parameters = [tail[place] for place in needed]
        self.leaf = torch.zeros((), device=self.parameters[0].device, requires_grad=True)
        """See Note [Passes that name their inputs]."""
        self._of_leaf = get_gradient_edge(self.leaf).node
        self.edges = edges_of(self.parameters)
        self.calls = weakref.WeakSet[Any]()
        """Nodes of calls that a backward pass may reach."""
        self._before: dict[int, list[torch.Tensor | None]] = {}
        """Gradient sums of the calls that a backward pass has reached, by the pass's number."""
        self._operation = taker.detach(self.parameters, self.is_still_to_come)

    def are(self, tail: Sequence[Any]) -> bool:
        """Whether exactly these need gradients among a replay's last arguments."""
        return _needs(tail) == self._needs and all(
            map(is_, map(tail.__getitem__, self._places), self.parameters)
        )

    def may_be_detached(self) -> bool:
        """Whether only Megatron-FSDP waits for their gradients."""
        return not any(weight._backward_hooks for weight in self.parameters) and all(
            len(weight._post_accumulate_grad_hooks or ()) == 1 for weight in self.parameters
        )

    def close(self) -> None:
        self._taker.attach(self._operation)

    def is_used_by(self, node: Any) -> None:
        """Record a call whose backward pass may follow."""
        self.calls.add(node)
        if not in_backward_pass():
            self._before.clear()

    def is_still_to_come(self) -> bool:
        if not in_backward_pass():
            return False
        now, executes = CURRENT_PASS.cached(), _EXECUTES.cached
        return any(node.computed_in != now and executes(node) for node in self.calls)

    def computed(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take a replay's gradients of all its last arguments; see the notes above."""
        now = node.computed_in = CURRENT_PASS.cached()
        if not _EXECUTES.cached(self._of_leaf):
            raise FastPathError(_NAMED + say(WITHOUT_FAST_PATH))
        if not self.may_be_detached():
            raise FastPathError(
                "A weight of a graph got a hook, or another AccumulateGrad node, after the forward "
                "pass that uses it began. Register the hook before, or " + say(WITHOUT_FAST_PATH)
            )
        total = [
            _cast(gradients[place], weight)
            for place, weight in zip(self._places, self.parameters, strict=True)
        ]
        before = self._before.pop(now, None)
        if before is not None:
            total = list(map(_sum, before, total))
        if self.is_still_to_come():
            self._before[now] = [one if one is None else one.clone() for one in total]
        else:
            used = [_EXECUTES.cached(node) for node, _ in self.edges]
            self._taker.take_detached(self._operation, total, used)


def _needs(tail: Sequence[Any]) -> list[bool]:
    return [getattr(value, "requires_grad", False) for value in tail]


def _cast(gradient: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """Cast as autograd casts what a function returns."""
    if gradient is None or gradient.dtype is weight.dtype:
        return gradient
    return gradient.to(weight.dtype)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
