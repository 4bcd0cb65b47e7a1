"""An eager pass that autograd sees as a replay: one node with all of the unit's outputs.

Note [When gradients are counted]
    Megatron-FSDP reduces a bucket once all its parameters have got a gradient. A replay is one
    node: it waits for the gradients of all its outputs, and then reaches all weights, those of an
    output that the loss does not use with no gradient. In an eager pass each weight gets its
    gradient as soon as the outputs that it needs have theirs, and the weights of an unused output
    are not reached. So if one rank falls back to eager alone, its buckets become ready in another
    order, and its collectives do not match those of the other ranks. Therefore a node ties the
    outputs of such a pass together. Autograd passes what is undefined on to the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Tie(torch.autograd.Function):
    """Passes tensors and their gradients on, all at once."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


def as_one_node(outputs: Any) -> Any:
    """``outputs``, whose gradients all arrive before any of them goes on; see the note above."""
    flat, spec = tree_flatten(outputs)
    tensors = {id(one): one for one in flat if isinstance(one, torch.Tensor) and one.requires_grad}
    if len(tensors) < 2:
        return outputs
    apply: Any = _Tie.apply
    tied = dict(zip(tensors, apply(*tensors.values()), strict=True))
    return tree_unflatten([tied.get(id(one), one) for one in flat], spec)
