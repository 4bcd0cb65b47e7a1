"""Weights of a grouped GEMM that autograd does not see.

A grouped GEMM computes the gradients of all its experts' weights at once, as pieces of one tensor.
Autograd then visits each weight by itself: a node of the graph, a hook, a gradient stored and taken
away again, a thousand times a step. Here the operation runs without its weights among autograd's
inputs, and its own backward function hands all their gradients over in one call.

Note [What autograd would have done]
    It would have added up what comes from all uses of a weight in one backward pass, and only then
    called the weight's hook. Another use can be the same operation, called twice, or anything else
    that reads a weight, a penalty on weights for one. Which of them a backward pass comes to, the
    engine says (``_will_engine_execute_node``), so gradients of one pass wait for each other:
    those of the operation for its last call, and that of a weight that is used in another way for
    the weight's own hook, or the other way round. A sum of two is the same sum in either order; one
    of three or more may be added up in another order than autograd's.
    A weight that has hooks of its own, or whose gradient is computed later, is not hidden.

Note [Passes that leave weights out]
    ``torch.autograd.grad``, or ``backward`` with ``inputs``, wants no gradients of weights, or not
    in this way. The operation has one more input, a leaf that nobody asks for by name: a pass that
    does not come to that leaf hands nothing over. A pass that asks for a hidden weight by name is
    told by autograd that the weight is not in the graph.

Note [Nodes that are kept]
    A weight has one AccumulateGrad node for as long as anything refers to it, and asking for one
    that nobody refers to makes it, which costs thirty times as much as the question itself. So they
    are kept. Were a weight given another one in spite of that, its own hook would come after its
    gradient was handed over, and ends the pass with an error (``GradientHandOff``).

Relied on: transformer-engine 2.20.2, ``_GroupedLinear``, which ``GroupedLinear.forward`` looks up
in its module for each call: ``forward`` takes weights and biases last, and ``backward`` returns
their gradients last; it does not ask which of its inputs need gradients but the tensors themselves.
torch 2.11: ``torch._C._will_engine_execute_node``, ``torch.autograd.graph.get_gradient_edge``, and
that ``save_for_backward`` takes tensors that are no inputs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron_cg.fsdp.fast.gradients import GradientHandOff
from megatron_cg.fsdp.fast.steps_aside import StepsAsideError
from megatron_cg.undo import set_attribute
from megatron_cg.versions import Symbol, changed

_MODULE, _NAME = "transformer_engine.pytorch.module.grouped_linear", "_GroupedLinear"
_FORWARD = Symbol(
    "transformer-engine",
    f"{_MODULE}:{_NAME}.forward",
    "a grouped GEMM",
    parameters=("ctx", "inp", "weights_and_biases"),
)
_BACKWARD = Symbol(
    "transformer-engine", f"{_MODULE}:{_NAME}.backward", "its gradients", parameters=("ctx",)
)
_EXECUTES = Symbol("torch", "torch._C:_will_engine_execute_node", "what a backward pass comes to")
RELIES_ON = (_FORWARD, _BACKWARD, _EXECUTES)
MANY = 4
"""Weights of one operation from which on it is worth hiding them."""
Gradients = Sequence[torch.Tensor | None]


def install_hidden(
    model: nn.Module, hand_off: GradientHandOff, graphed: Container[nn.Module] = ()
) -> Callable[[], None]:
    """Hide the weights of Transformer Engine's grouped GEMMs; returns the undo.

    Args:
        model: what Megatron-FSDP wraps.
        hand_off: takes the gradients.
        graphed: modules whose Python no longer runs; they are left as they are.

    Raises:
        StepsAsideError: no grouped GEMM is loaded.
        UpstreamChangedError: it is not the one that this relies on.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        raise StepsAsideError("no grouped GEMM of Transformer Engine's is there")
    _FORWARD.find(), _BACKWARD.find(), _EXECUTES.find()
    return hide_in(module, _NAME, HiddenWeights(model, hand_off, graphed))


def hide_in(module: Any, name: str, hidden: HiddenWeights) -> Callable[[], None]:
    """Let a function of autograd's, looked up in ``module``, be run without its weights.

    Several models share one stand-in. The returned function undoes it for this one.
    """
    stand_in: Any = getattr(module, name)
    if not isinstance(stand_in, _StandIn):
        stand_in = _StandIn(stand_in)
        stand_in.undo = set_attribute(module, name, stand_in)
    stand_in.models.append(hidden)

    def undo() -> None:
        stand_in.models.remove(hidden)
        hidden.close()
        if not stand_in.models:
            stand_in.undo()

    return undo


class _StandIn:
    """Stands in the place of the function: ``apply`` without weights, all else its own."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._first = _place_of_weights(function)
        self.models: list[HiddenWeights] = []
        self.undo: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def apply(self, *args: Any) -> Any:
        """What the function's own ``apply`` does."""
        tail = args[self._first :]
        for model in self.models:
            together = model.together(tail)
            if together is not None:
                function: Callable[..., Any] = _Hidden.apply
                shown = args[: self._first]
                return function(self._function, together, tail, together.leaf, *shown)
        return self._function.apply(*args)


def _place_of_weights(function: Any) -> int:
    """How many arguments come before the weights, the context not counted."""
    kinds = [one.kind for one in inspect.signature(function.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        expected = f"{_FORWARD.expected}, whose weights come last"
        raise changed(_FORWARD.distribution, _FORWARD.path, expected)
    return kinds.index(inspect.Parameter.VAR_POSITIONAL) - 1


class _Hidden(torch.autograd.Function):
    """The function itself, called with weights that autograd was not given."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, weights: _Weights, tail: tuple[Any, ...], _leaf: Any, *shown: Any
    ) -> Any:
        ctx.hidden = function, weights, len(shown)
        weights.is_used_by(ctx)
        return function.forward(ctx, *shown, *tail)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function, weights, shown = ctx.hidden
        found = function.backward(ctx, *gradients)
        weights.computed(ctx, found[shown:])
        return (None, None, None, None, *found[:shown])


class HiddenWeights:
    """Which weights of one model are hidden.

    Args:
        model: what Megatron-FSDP wraps.
        hand_off: takes the gradients.
        graphed: modules that are left as they are.
    """

    def __init__(
        self, model: nn.Module, hand_off: GradientHandOff, graphed: Container[nn.Module] = ()
    ) -> None:
        self._modules = [module for module in model.modules() if module not in graphed]
        self._hand_off = hand_off
        self._eager: frozenset[int] | None = None
        self._of: dict[int, _Weights] = {}

    def together(self, tail: Sequence[Any]) -> _Weights | None:
        """The weights among an operation's last arguments, or None where they stay visible."""
        if not tail or not torch.is_tensor(tail[0]):
            return None
        weights = self._of.get(id(tail[0]))
        if weights is None or not weights.are(tail):
            weights = self._add(tail)
        return weights if weights is not None and weights.may_hide() else None

    def close(self) -> None:
        """Let go of the weights."""
        for weights in self._of.values():
            self._hand_off.hidden_no_more(weights.parameters)
        self._of.clear()

    def _add(self, tail: Sequence[Any]) -> _Weights | None:
        if self._eager is None:
            # Between two steps modules may hold the optimizer's DTensors; in a pass they do not.
            own = (p for module in self._modules for p in module.parameters(recurse=False))
            self._eager = frozenset(map(id, own))
        needed = [n for n, one in enumerate(tail) if torch.is_tensor(one) and one.requires_grad]
        ids = {id(tail[place]) for place in needed}
        known = all(i in self._eager for i in ids) and all(
            self._hand_off.knows(tail[place]) for place in needed
        )
        if len(needed) < MANY or len(ids) < len(needed) or not known:
            return None
        weights = _Weights([tail[place] for place in needed], needed, self._hand_off)
        self._of[id(tail[0])] = weights
        return weights


class _Weights:
    """Weights of one operation, and what is known of them in a backward pass."""

    def __init__(self, parameters: list[Any], places: list[int], hand_off: GradientHandOff) -> None:
        self.parameters, self._places, self._hand_off = parameters, places, hand_off
        self.leaf = torch.zeros((), device=parameters[0].device, requires_grad=True)
        """See Note [Passes that leave weights out]."""
        self._executes: Callable[[Any], bool] = _EXECUTES.find()
        self._of_leaf = get_gradient_edge(self.leaf).node
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._calls: list[weakref.ref[Any]] = []
        """Nodes of calls whose backward pass has not come."""
        self._before: tuple[object, Gradients] | None = None
        """The pass, and the sum of gradients of calls that it has come to."""
        hand_off.hidden_are(self.parameters, self.is_still_to_come)

    def are(self, tail: Sequence[Any]) -> bool:
        """Whether they are the ones among an operation's last arguments."""
        pairs = zip(self.parameters, self._places, strict=True)
        return len(tail) > self._places[-1] and all(tail[place] is one for one, place in pairs)

    def may_hide(self) -> bool:
        """Whether nobody but Megatron-FSDP waits for their gradients, and all are wanted."""
        return all(
            one.requires_grad
            and not one._backward_hooks
            and len(one._post_accumulate_grad_hooks or ()) == 1
            for one in self.parameters
        ) and not any(getattr(one, "skip_backward_post_hook", False) for one in self.parameters)

    def is_used_by(self, node: Any) -> None:
        """A call has been made, whose backward pass may come."""
        self._calls = [one for one in self._calls if one() is not None]
        self._calls.append(weakref.ref(node))

    def is_still_to_come(self) -> bool:
        """Whether this backward pass comes to a call that it has not come to yet."""
        try:
            return any(self._executes(one) for call in self._calls if (one := call()) is not None)
        except RuntimeError:
            return False

    def computed(self, node: Any, gradients: Gradients) -> None:
        """A call's gradients, of weights and what else came last; see the notes above."""
        self._calls = [one for one in self._calls if one() not in (None, node)]
        if not self._executes(self._of_leaf):
            return
        found: Gradients = [gradients[place] for place in self._places]
        now = self._hand_off.backward_pass()
        if self._before is not None and self._before[0] is now:
            found = [_sum(one, other) for one, other in zip(self._before[1], found, strict=True)]
        self._before = None
        if self.is_still_to_come():
            self._before = now, found
            return
        later = [self._executes(one) for one in self._nodes]
        self._hand_off.take_hidden(self.parameters, found, later)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
