"""Weights of grouped GEMMs, detached from autograd.

A grouped GEMM computes the gradients of all its experts' weights at once, as pieces of one tensor.
Autograd then visits each weight: it runs a node and a hook, stores the gradient and removes it
again, a thousand times a step. Here the operation runs without its weights among autograd's
inputs. Its own backward function passes all their gradients on in one call.

Note [What autograd would have done]
    Autograd sums the gradients from all uses of a weight in one backward pass, and only then calls
    the weight's hook. Another use may be a second call of the same operation, or anything else that
    reads a weight, such as a penalty on weights. The engine tells which uses a backward pass
    reaches (``_will_engine_execute_node``), so gradients of one pass wait for each other. Those of
    the operation wait for its last call. If a weight is also used in another way, its gradient from
    the operation waits for the weight's own hook, or the other way round. A sum of two terms
    does not depend on their order. Three or more terms may be added in another order than
    autograd's. The engine's number of a pass identifies it; a pass inside another one (reentrant
    recompute) has its own number.
    A weight with hooks of its own, or with a gradient that is computed later, is not detached.

Note [Passes that name their inputs]
    ``torch.autograd.grad``, or ``backward`` with ``inputs``, computes gradients of some tensors
    only. Nothing tells whether detached weights are among them. So the operation has one more
    input, a leaf that no caller can name. A pass that does not reach the leaf ends with an error.

Note [Nodes that are kept]
    A weight has one AccumulateGrad node as long as something refers to the node. Without a
    reference each query creates a node, which costs thirty times as much as the query itself. So
    the nodes are kept. If a weight still gets another node, its own hook runs after its gradient
    was taken, and the pass ends with an error (``GradientBucketing``).

TE's ``GroupedLinear.forward`` looks up ``_GroupedLinear`` in its module for each call. Its
``backward`` asks the tensors, and not the context, which gradients are needed.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.gradients.bucketing import GradientBucketing
from megatron_cg.fastpath.hook_closures import hooks_of_gradient
from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.upstream.backward_pass import CURRENT_PASS, NO_PASS
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol, changed

MODULE, _NAME = "transformer_engine.pytorch.module.grouped_linear", "_GroupedLinear"
NO_EXPERTS = "no grouped GEMM of Transformer Engine's is there"
_FORWARD = Symbol(
    "transformer-engine",
    f"{MODULE}:{_NAME}.forward",
    "a grouped GEMM",
    parameters=("ctx", "inp", "weights_and_biases"),
)
_BACKWARD = Symbol(
    "transformer-engine", f"{MODULE}:{_NAME}.backward", "its gradients", parameters=("ctx",)
)
_EXECUTES = Symbol("torch", "torch._C:_will_engine_execute_node", "what a backward pass comes to")
RELIES_ON = (_FORWARD, _BACKWARD, _EXECUTES, CURRENT_PASS)
MANY = 4
"""Minimum number of an operation's weights; with fewer, detaching does not pay off."""
Gradients = Sequence[torch.Tensor | None]


def install_detached(detached: DetachedWeights) -> Callable[[], None]:
    """Detach the weights of Transformer Engine's grouped GEMMs; returns the undo.

    Args:
        detached: selects the weights that can be detached.

    Raises:
        NotApplicableError: no grouped GEMM is loaded.
        UpstreamChangedError: the grouped GEMM is not the one that this relies on.
    """
    module = sys.modules.get(MODULE)
    if module is None:
        raise NotApplicableError(NO_EXPERTS)
    for symbol in RELIES_ON:
        symbol.find()
    return detach_in(module, _NAME, detached)


def detach_in(module: Any, name: str, detached: DetachedWeights) -> Callable[[], None]:
    """Let an autograd function, looked up in ``module``, run with detached weights.

    Several models share one replacement. The returned function undoes this for one model.
    """
    replacement: Any = getattr(module, name)
    if not isinstance(replacement, _Replacement):
        replacement = _Replacement(replacement)
        replacement.undo = set_attribute(module, name, replacement)
    replacement.models.add(detached)

    def undo() -> None:
        replacement.models.discard(detached)
        detached.close()
        if not replacement.models:
            replacement.undo()

    return undo


class _Replacement:
    """Replaces the function: ``apply`` detaches weights, all else is the function's own."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._first = _place_of_weights(function)
        self.models: weakref.WeakSet[DetachedWeights] = weakref.WeakSet()
        self.undo: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_function"], name)

    def apply(self, *args: Any) -> Any:
        """Do what the function's own ``apply`` does."""
        tail = args[self._first :]
        for model in self.models:
            weights = model.together(tail)
            if weights is not None:
                return call_detached(self._function, weights, args[: self._first], tail)
        return self._function.apply(*args)


def _place_of_weights(function: Any) -> int:
    """How many arguments come before the weights, without the context."""
    kinds = [one.kind for one in inspect.signature(function.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        expected = f"{_FORWARD.expected}, whose weights come last"
        raise changed(_FORWARD.distribution, _FORWARD.path, expected)
    return kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1


def call_detached(
    function: Any,
    weights: Weights,
    head: Sequence[Any],
    tail: Sequence[Any],
    *,
    borrowed: bool = False,
) -> Any:
    """Do what ``function.apply(*head, *tail)`` does, with weights detached from autograd.

    Args:
        function: an autograd function, or an object with its ``forward`` and ``backward``.
        weights: the weights in ``tail``.
        head: the first arguments, before ``tail``.
        tail: the last arguments.
        borrowed: whether gradients of ``tail`` stay in a graph's memory (:class:`.ReplayFunction`).
    """
    apply: Callable[..., Any] = _Detached.apply
    return apply(function, weights, tail, borrowed, weights.leaf, *head)


class _Detached(torch.autograd.Function):
    """Calls the function with weights that autograd does not get."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Any,
        weights: Weights,
        tail: Sequence[Any],
        borrowed: bool,
        _leaf: Any,
        *head: Any,
    ) -> Any:
        ctx.detached, ctx.computed_in = (function, weights, borrowed, len(head)), NO_PASS
        weights.is_used_by(ctx)
        return function.forward(ctx, *head, *tail)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function, weights, borrowed, head = ctx.detached
        found = function.backward(ctx, *gradients)
        weights.computed(ctx, found[head:], borrowed=borrowed)
        return (None, None, None, None, None, *found[:head])


class DetachedWeights:
    """The detached weights of one model.

    Args:
        model: the module that Megatron-FSDP wraps.
        bucketing: takes the gradients.
        graphed: modules inside graphs; only calls by a graph detach their weights.
    """

    def __init__(
        self, model: nn.Module, bucketing: GradientBucketing, graphed: Container[nn.Module] = ()
    ) -> None:
        self._modules = [module for module in model.modules() if module not in graphed]
        self._bucketing = bucketing
        self._eager: frozenset[int] | None = None
        self._of: dict[int, Weights] = {}

    def together(self, tail: Sequence[Any], *, of_graph: bool = False) -> Weights | None:
        """The weights in the last arguments of a call; None: they stay attached to autograd."""
        if not tail or not torch.is_tensor(tail[0]):
            return None
        weights = self._of.get(id(tail[0]))
        if weights is not None and not weights.are(tail):
            if weights.are_used():
                return None  # its calls and this one may belong to one pass
            self._of.pop(id(tail[0])).close()
            weights = None
        if weights is None:
            weights = self._add(tail, of_graph=of_graph)
        return weights if weights is not None and weights.may_be_detached() else None

    def close(self) -> None:
        """Attach all weights to autograd again."""
        for weights in self._of.values():
            weights.close()
        self._of.clear()

    def _add(self, tail: Sequence[Any], *, of_graph: bool) -> Weights | None:
        needed = [place for place, needs in enumerate(_needs(tail)) if needs]
        if not needed or not all(self._bucketing.knows(tail[place]) for place in needed):
            return None
        ids = {id(tail[place]) for place in needed}
        if len(ids) < len(needed):
            return None
        if not of_graph and (len(needed) < MANY or not ids <= self._ids_outside_of_graphs()):
            return None
        if not ids.isdisjoint(id(p) for other in self._of.values() for p in other.parameters):
            return None  # another operation's weights; their own hooks wait for that operation
        weights = Weights(tail, needed, self._bucketing)
        self._of[id(tail[0])] = weights
        return weights

    def _ids_outside_of_graphs(self) -> frozenset[int]:
        if self._eager is None:
            # Between two steps modules may hold the optimizer's DTensors; in a pass they do not.
            own = (p for module in self._modules for p in module.parameters(recurse=False))
            self._eager = frozenset(map(id, own))
        return self._eager


class Weights:
    """Weights of one operation, and their state in a backward pass."""

    def __init__(
        self, tail: Sequence[Any], needed: list[int], bucketing: GradientBucketing
    ) -> None:
        self._places, self._bucketing = needed, bucketing
        self._needs = _needs(tail)
        self.parameters = [tail[place] for place in needed]
        self.leaf = torch.zeros((), device=self.parameters[0].device, requires_grad=True)
        """See Note [Passes that name their inputs]."""
        self._executes: Callable[[Any], bool] = _EXECUTES.find()
        self._number_of_pass: Callable[[], int] = CURRENT_PASS.find()
        self._of_leaf = get_gradient_edge(self.leaf).node
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self._calls: list[weakref.ref[Any]] = []
        """Nodes of calls that a backward pass may reach."""
        self._before: dict[int, list[torch.Tensor | None]] = {}
        """Gradient sums of the calls that a backward pass has reached, by the pass's number."""
        self._together = bucketing.detach(self.parameters, self.is_still_to_come)

    def are(self, tail: Sequence[Any]) -> bool:
        """Whether exactly these need gradients among an operation's last arguments."""
        return _needs(tail) == self._needs and all(
            map(is_, map(tail.__getitem__, self._places), self.parameters)
        )

    def may_be_detached(self) -> bool:
        """Whether only Megatron-FSDP waits for their gradients."""
        return (
            not any(one._backward_hooks for one in self.parameters)
            and all(len(hooks_of_gradient(one)) == 1 for one in self.parameters)
            and not any(getattr(one, "skip_backward_post_hook", False) for one in self.parameters)
        )

    def close(self) -> None:
        """Attach them to autograd again."""
        self._bucketing.attach(self._together)

    def is_used_by(self, node: Any) -> None:
        """Record a call whose backward pass may follow."""
        self._calls = [one for one in self._calls if one() is not None]
        self._calls.append(weakref.ref(node))
        if self._number_of_pass() == NO_PASS:
            self._before.clear()

    def are_used(self) -> bool:
        """Whether there is a call whose backward pass may follow."""
        return any(call() is not None for call in self._calls)

    def is_still_to_come(self) -> bool:
        """Whether this backward pass has yet to reach a call."""
        now = self._number_of_pass()
        if now == NO_PASS:
            return False
        calls = (call() for call in self._calls)
        return any(
            node is not None and node.computed_in != now and self._executes(node) for node in calls
        )

    def computed(self, node: Any, gradients: Gradients, *, borrowed: bool = False) -> None:
        """Take a call's gradients of all its last arguments; see the notes above."""
        now = node.computed_in = self._number_of_pass()
        if not self._executes(self._of_leaf):
            raise FastPathError(
                "A backward pass that names its inputs, as torch.autograd.grad does, reached a "
                "graph or a grouped GEMM. The FSDP fast path has detached its weights from "
                "autograd, and does not know whether the pass names them. Type "
                "--cg-no-fsdp-fast-path, or in Python fast_path=False."
            )
        if not self.may_be_detached():
            raise FastPathError(
                "A weight of a graph or a grouped GEMM got a hook, or another AccumulateGrad node, "
                "after the forward pass that uses it began. Register the hook before, or type "
                "--cg-no-fsdp-fast-path, or in Python fast_path=False."
            )
        found = [
            _cast(gradients[place], one)
            for place, one in zip(self._places, self.parameters, strict=True)
        ]
        before = self._before.pop(now, None)
        if before is not None:
            found = [_sum(one, other) for one, other in zip(before, found, strict=True)]
        if self.is_still_to_come():
            self._before[now] = [
                one.clone() if borrowed and one is not None else one for one in found
            ]
        else:
            used = [self._executes(one) for one in self._nodes]
            self._bucketing.take_detached(self._together, found, used, borrowed=borrowed)


def _needs(tail: Sequence[Any]) -> list[bool]:
    return [getattr(one, "requires_grad", False) for one in tail]


def _cast(gradient: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """Cast as autograd casts what a function returns."""
    if gradient is None or gradient.dtype is weight.dtype:
        return gradient
    return gradient.to(weight.dtype)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
