"""Gradients of many parameters, taken where autograd has just computed them all.

A grouped GEMM computes the gradients of all its experts at once. Autograd then stores each in its
parameter and calls a hook for it; only after the last of them can a fused copy begin, and the GPU
waits for that. A hook of the operation's node sees all gradients before the first is stored.

Note [Only where nobody else would notice]
    What the hook takes is missing to AccumulateGrad, which stores nothing and calls the
    parameter's hook all the same (torch 2.11); ours knows that the parameter is done. So it takes
    all parameters of a node or none, and none where anything else waits for the gradient: another
    hook, a gradient stored already, a pass outside of Megatron-FSDP's backward pass
    (``torch.autograd.grad``, which wants it returned).

Note [A module that is called twice]
    Then a parameter's gradient is a sum, which AccumulateGrad's own inputs hold: neither node has
    it. So a pass is taken only if no other pass of the same module was open at any time since. A
    pass is open until its node has run or is gone; interleaved microbatches of a pipeline are left
    to the longer way for the same reason.

Relied on: torch 2.11, ``Node.next_functions``, in the order of the gradients that ``register_hook``
hands over, ``AccumulateGrad.variable``, and that hooks may return None for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from megatron_cg.fsdp.fast.gradients import GradientHandOff
from megatron_cg.undo import set_attribute

MANY = 4
"""Parameters that a module holds itself, from which on it is worth a hook for each pass."""
Gradients = Sequence[torch.Tensor | None]


def install_nodes(
    model: nn.Module, hand_off: GradientHandOff, graphed: Container[nn.Module] = ()
) -> Callable[[], None]:
    """Let ``hand_off`` take the gradients of modules with many parameters; returns the undo.

    Modules in ``graphed`` are left as they are: a replay runs none of their Python, and the guard
    would find that it was replaced.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if module in graphed:
                continue
            # Between two steps these may be the optimizer's DTensors; what counts is seen later.
            if len(list(module.parameters(recurse=False))) >= MANY:
                undo.callback(set_attribute(module, "forward", _Taking(module.forward, hand_off)))
        return undo.pop_all().close


class _Pass:
    """One call of a module, for as long as autograd may still come back to it."""

    alone = True
    """Whether no other pass of the module was open since it began."""


class _Taking:
    """Stands in the place of a module's ``forward``."""

    def __init__(self, forward: Callable[..., Any], hand_off: GradientHandOff) -> None:
        self._forward, self._hand_off = forward, hand_off
        self._open: WeakSet[_Pass] = WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) and output else output
        node = getattr(first, "grad_fn", None)
        if node is not None:
            self._follow(node)
        return output

    def _follow(self, node: torch.autograd.graph.Node) -> None:
        """Note the pass, and what its node computes gradients of."""
        now = _Pass()
        for earlier in self._open:
            earlier.alone = now.alone = False
        self._open.add(now)
        leaves: list[Any] = [
            getattr(function, "variable", None) for function, _ in node.next_functions
        ]
        places = [n for n, leaf in enumerate(leaves) if self._hand_off.knows(leaf)]
        # The pass is kept by its node's hook alone, and so ends with the node at the latest.
        node.register_hook(partial(self._take, now, places, [leaves[n] for n in places]))

    def _take(
        self,
        now: _Pass,
        places: Sequence[int],
        parameters: Sequence[nn.Parameter],
        gradients: Gradients,
        _outputs: Gradients,
    ) -> Gradients | None:
        self._open.discard(now)
        found = [gradients[place] for place in places]
        if len(places) < MANY or not now.alone or not self._hand_off.take(parameters, found):
            return None
        kept = list(gradients)
        for place in places:
            kept[place] = None
        return tuple(kept)
