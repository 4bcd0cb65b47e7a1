"""Gradients of many parameters, taken where autograd has just computed them all.

A grouped GEMM computes the gradients of all its experts at once. Autograd then stores each in its
parameter and calls a hook for it, which costs more than to launch the fused copy that they all are
waiting for. Here a hook of the operation's node sees all gradients before the first is stored, and
keeps them; each parameter's own hook then only counts, and the last one hands all over.

Note [Every parameter's own hook decides]
    What the node's hook keeps is missing to AccumulateGrad, which stores nothing and calls the
    parameter's hook all the same (torch 2.11), when all that uses the parameter has been
    differentiated. So nothing is handed over before its time, and where a parameter has been used
    in another way too, its hook finds the rest of the gradient and adds what was kept. Autograd
    would have made the same sum, of two; of three or more it may add in another order.
    What does not come from AccumulateGrad is not to be kept: ``torch.autograd.grad``, or
    ``backward`` with ``inputs``, wants gradients returned, or leaves parameters out.

Relied on: torch 2.11, ``Node.next_functions``, in the order of the gradients that ``register_hook``
hands over, ``AccumulateGrad.variable``, that hooks may return None for a gradient, and
``torch._C._will_engine_execute_node``, which raises for a leaf that ``autograd.grad`` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fast.gradients import GradientHandOff
from megatron_cg.undo import set_attribute
from megatron_cg.versions import Symbol

_EXECUTES = Symbol("torch", "torch._C:_will_engine_execute_node", "what a backward pass comes to")
RELIES_ON = (_EXECUTES,)
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


class _Taking:
    """Stands in the place of a module's ``forward``."""

    def __init__(self, forward: Callable[..., Any], hand_off: GradientHandOff) -> None:
        self._forward, self._hand_off = forward, hand_off

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) and output else output
        node = getattr(first, "grad_fn", None)
        if node is not None:
            self._follow(node)
        return output

    def _follow(self, node: torch.autograd.graph.Node) -> None:
        """Note which of the node's gradients are of which parameters."""
        places: list[int] = []
        leaves: list[Any] = []
        for place, (function, _) in enumerate(node.next_functions):
            if self._hand_off.knows(getattr(function, "variable", None)):
                places.append(place)
                leaves.append(function)
        # A parameter that it has twice has one hook, which cannot tell when both have come.
        if len(places) >= MANY and len({id(leaf.variable) for leaf in leaves}) == len(leaves):
            node.register_hook(partial(self._take, places, leaves))

    def _take(
        self,
        places: Sequence[int],
        leaves: Sequence[Any],
        gradients: Gradients,
        _outputs: Gradients,
    ) -> Gradients | None:
        found = [gradients[place] for place in places]
        parameters = [leaf.variable for leaf in leaves]
        if not _all_accumulate(leaves) or not self._hand_off.keep(parameters, found):
            return None
        left = list(gradients)
        for place in places:
            left[place] = None
        return tuple(left)


def _all_accumulate(leaves: Sequence[Any]) -> bool:
    """Whether this backward pass comes to all these AccumulateGrad nodes."""
    execute: Callable[[Any], bool] = _EXECUTES.find()
    try:
        return all(map(execute, leaves))
    except RuntimeError:
        return False
