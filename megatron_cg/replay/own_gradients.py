"""Gradients of a replay's inputs that somebody may keep.

Note [A gradient that a leaf takes over]
    A graph's backward replay leaves the gradient of an input in the graph's memory, and the next
    replay overwrites it. An AccumulateGrad node takes over the first gradient of a leaf (torch
    2.11, ``accumulate_grad.h``: "Case 1.2"), and many operations pass a gradient on as it is. So a
    parameter in front of a unit, such as a prompt, would hold the gradient of the last microbatch
    twice, and that of the first not at all.

Note [Where a gradient ends]
    The nodes ahead of an input are followed until each path is known to keep nothing: at a replay,
    which copies what it receives, or at an operation that only passes on gradients that it has
    computed. If a path reaches a leaf, unknown code or more than a few nodes, it is copied.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]
_FAR = 16
"""How many nodes are looked at; a gradient that goes further is copied."""
_COMPUTES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Bmm", "Convolution", "Div", "Embedding", "Gather", "Gelu", "Index", "IndexSelect"),
        *("Mm", "Mul", "NativeDropout", "NativeLayerNorm", "Pow", "Relu", "Sigmoid", "Silu"),
        *("Softmax", "Tanh"),
    )
)
"""Operations of torch whose backward functions make each gradient that they pass on. Not ``Addmm``:
it passes the gradient of a bias on."""
_LINEAR = (
    "megatron.core.tensor_parallel.layers",
    "megatron_cg.moe.grouped_gemm",
    "transformer_engine.pytorch.module",
)
"""Modules whose functions do so too."""
_KNOWN = ("megatron.core", "megatron_cg", "megatron_fsdp", "transformer_engine")
"""Packages whose functions keep no gradient, though they may pass one on. Those of checkpoints run
a backward pass of their own, which may end at a leaf."""


def own_gradient(value: Any, is_replay: Callable[[Any], bool], *, always: bool = False) -> Any:
    """An input of a graph, on the same memory, whose gradient nobody else overwrites.

    ``is_replay`` says whether a node of autograd is a replay that waits for its backward.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    is_kept = always or value.retains_grad or value._backward_hooks
    if not (is_kept or _may_stay(value.grad_fn, is_replay)):
        return value
    apply: Any = _Copied.apply
    return apply(value, same_memory, torch.clone)


def _may_stay(node: Any, is_replay: Callable[[Any], bool]) -> bool:
    """Whether anything ahead may keep a gradient; see Note [Where a gradient ends]."""
    # Several edges may lead to one node.
    ahead, seen = [node], {node}
    while ahead and len(seen) <= _FAR:
        node = ahead.pop()
        kind: Any = type(node)
        if node is not None and (is_replay(node) or _computes(kind)):
            continue
        if node is None or not _passes_on(kind):  # None: the input is a leaf.
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        ahead += following
    return bool(ahead)


@cache
def _computes(kind: Any) -> bool:
    function = getattr(kind, "_forward_cls", None)  # of a function that is written in Python
    if function is None:
        return kind.__name__ in _COMPUTES
    return bool(function.__module__.startswith(_LINEAR))


@cache
def _passes_on(kind: Any) -> bool:
    function = getattr(kind, "_forward_cls", None)
    if function is None:
        return bool(kind.__name__.rstrip("0123456789").endswith("Backward"))
    return bool(function.__module__.startswith(_KNOWN)) and "Checkpoint" not in function.__name__


class PassedOn(torch.autograd.Function):
    """Passes a tensor on as ``make`` makes it, and its gradient, if one comes, as ``give`` does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, make: Change, give: Change) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.give = give
        return make(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (gradient,) = gradients
        return None if gradient is None else ctx.give(gradient), None, None


class _Copied(PassedOn):
    """And a copy of its gradient."""


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and count of writes behind a node of its own; no view for autograd."""
    apply: Any = PassedOn.apply
    made: torch.Tensor = apply(tensor, torch.Tensor.detach, lambda gradient: gradient)
    return made
