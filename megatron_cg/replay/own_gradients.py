"""Gradients of a replay's inputs that somebody may keep.

Note [A gradient that a leaf takes over]
    A graph's backward replay leaves the gradient of an input in the graph's memory, and the next
    replay overwrites it. An AccumulateGrad node does not copy the first gradient of a leaf, it
    takes it over (torch 2.11, ``accumulate_grad.h``: "Case 1.2"). Many operations pass a gradient
    on as it is: a view, an addition, a concatenation. So a parameter in front of a unit, such as
    learned queries, would hold the gradient of the last microbatch twice, and that of the first not
    at all. A gradient that goes to other replays alone needs no copy: they copy what they receive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FAR = 8
"""How many nodes are looked at; a gradient that goes further is copied."""


def own_gradient(value: Any, is_replay: Callable[[Any], bool]) -> Any:
    """``value`` on the same memory, whose gradient nobody else overwrites.

    Args:
        value: an input of a graph.
        is_replay: whether a node of autograd is a replay that waits for its backward.
    """
    if not value.requires_grad or _goes_to_replays(value.grad_fn, is_replay):
        return value
    apply: Any = _Copied.apply
    return apply(value)


def own_gradient_of_leaf(value: Any, is_replay: Callable[[Any], bool]) -> Any:
    """``value`` on the same memory, whose gradient no leaf takes over from the graph.

    For layers under Megatron-FSDP, which takes the gradients of its own leaves at once. Only
    operations of one tensor are followed, so that a layer between others pays for a few questions.
    Arguments are as in :func:`own_gradient`.
    """
    if not value.requires_grad:
        return value
    node = value.grad_fn
    for _ in range(_FAR):
        if node is None:
            break
        if is_replay(node):
            return value
        following = [one for one, _ in node.next_functions if one is not None]
        if len(following) > 1:
            return value
        if not following:
            leaf = getattr(node, "variable", None)
            if leaf is None or leaf._post_accumulate_grad_hooks:
                return value
            break
        node = following[0]
    else:
        return value
    apply: Any = _Copied.apply
    return apply(value)


def _goes_to_replays(node: Any, is_replay: Callable[[Any], bool]) -> bool:
    ahead = [node]
    for _ in range(_FAR):
        node = ahead.pop()
        if node is None:
            return False
        if not is_replay(node):
            following = [one for one, _ in node.next_functions if one is not None]
            if not following:
                return False
            ahead += following
        if not ahead:
            return True
    return False


class _Copied(torch.autograd.Function):
    """Passes a tensor on, and a copy of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None if gradients[0] is None else gradients[0].clone()
