"""Tensors at the border of a graph: inputs whose gradients are kept, and parts of DTensors.

Note [A gradient that a leaf takes over]
    A backward replay leaves the gradient of an input in the graph's memory, and the next replay
    overwrites it. An AccumulateGrad node takes over the first gradient of a leaf (torch 2.11,
    ``accumulate_grad.h``: "Case 1.2"), and many operations pass a gradient on as it is. So a
    parameter in front of a unit, such as a prompt, would hold that of the last microbatch twice.

Note [Where a gradient ends]
    The nodes ahead of an input are followed until each path is known to keep nothing: at a replay,
    which copies what it receives, or at an operation that only passes on gradients that it has
    computed. If a path reaches a leaf, unknown code or more than a few nodes, it is copied.

Relied on: torch 2.11, ``DTensor(local, spec, requires_grad=...)``, ``DeviceMesh._rank_map``.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from megatron_cg.upstream.symbols import Symbol

CURRENT_PASS = Symbol("torch._C:_current_graph_task_id", "which backward pass is under way")
NO_PASS = -1
"""What it returns outside of backward passes."""
RUN_BACKWARD = Symbol(
    "torch.autograd:_engine_run_backward", "what every backward pass from Python calls"
)
INPUTS = 3
"""Which of its arguments after the roots are the tensors whose gradients are asked for."""
RELIES_ON = (
    *(CURRENT_PASS, RUN_BACKWARD),
    Symbol(
        "torch.distributed.tensor:DTensor",
        "a local tensor and its layout",
        attributes=("_local_tensor", "_spec"),
    ),
)
_ALIAS = torch.ops.aten.alias.default
Change = Callable[[torch.Tensor], torch.Tensor]
Edge = tuple[Any, int]
"""A node of autograd, and which of its inputs."""
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
    "megatron_cg.experts.grouped_gemm",
    "transformer_engine.pytorch.module",
)
"""Modules whose functions do so too."""
_KNOWN = ("megatron.core", "megatron_cg", "megatron_fsdp", "transformer_engine")
"""Packages whose functions keep no gradient, though they may pass one on. Those of checkpoints run
a backward pass of their own, which may end at a leaf."""


def in_backward_pass() -> bool:
    """Whether a backward pass of autograd is under way in this thread."""
    return bool(CURRENT_PASS.cached() != NO_PASS)


def own_gradient(value: Any, is_replay: Callable[[Any], bool], *, always: bool = False) -> Any:
    """An input of a graph, on the same memory, whose gradient nobody else overwrites.

    ``is_replay`` says whether a node of autograd is a replay that waits for its backward.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    is_kept = always or value.retains_grad or value._backward_hooks
    if not (is_kept or _may_stay(value.grad_fn, is_replay)):
        return value
    return pass_on(value, same_memory, torch.clone)


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

    made = 0
    """How many nodes this package has made of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, make: Change, give: Change) -> torch.Tensor:
        PassedOn.made += 1
        ctx.set_materialize_grads(False)
        ctx.give = give
        return make(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (gradient,) = gradients
        return None if gradient is None else ctx.give(gradient), None, None


pass_on: Callable[..., torch.Tensor] = PassedOn.apply
"""Takes the arguments of its forward, without ``ctx``."""


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on it; ``view_as`` would change strides of dimensions of size 1."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, DTensor):
        return tensor.view_as(tensor)  # TE's quantized ones (2.20.2) would be dequantized.
    return _ALIAS(tensor)  # type: ignore[no-any-return]


def copied(value: Any, memory: dict[int, torch.UntypedStorage | None]) -> Any:
    """A copy with its strides, behind a node of this package: it is known whose result it is.

    ``memory`` has by address the copies so far, so that tensors which share memory still do. None
    there means that nothing is copied.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor or value.is_conj() or value.is_neg():
        made = value.detach().clone()
    else:
        storage, place = value.untyped_storage(), (value.storage_offset(), value.size())
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage.clone()
        if (copy := memory[storage.data_ptr()]) is None:
            return value
        made = value.new_empty(0).set_(copy, *place, value.stride())
    return pass_on(value, lambda _: made, lambda gradient: gradient)


def local(tensor: Any) -> Any:
    """What this rank has of a DTensor, once it is there; anything else itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def spec_of(tensor: Any) -> Any:
    return tensor._spec if isinstance(tensor, DTensor) else None


def laid_out(tensor: Any, spec: Any) -> Any:
    """A DTensor of this local tensor, or the tensor itself if ``spec`` is None."""
    if spec is None or tensor is None:
        return tensor
    make: Any = DTensor
    return make(tensor, copy.copy(spec), requires_grad=tensor.requires_grad)


def same_placements(*specs: Any) -> bool:
    one, two = (spec and (spec.mesh, spec.placements) for spec in specs)
    return bool(one == two)


def ranks_of_meshes(module: nn.Module) -> set[int]:
    """The keys of the host's memory with the ranks of meshes, which code in a pass may slice."""
    specs = {spec_of(tensor) for tensor in (*module.parameters(), *module.buffers())} - {None}
    tensors = (getattr(spec.mesh, "_rank_map", spec.mesh.mesh) for spec in specs)
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def edge_of(tensor: torch.Tensor | GradientEdge) -> Edge:
    edge = tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_of(roots: Sequence[Any]) -> list[Edge]:
    return [edge_of(root) for root in roots if getattr(root, "requires_grad", True)]


def users_of(roots: Sequence[Any]) -> dict[Edge, list[Any]]:
    """The nodes that give a gradient to each edge below ``roots``, or to one of ``detached``."""
    users: dict[Edge, list[Any]] = {edge: [] for edge in edges_of(roots)}
    ahead, seen = [node for node, _ in users], set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in (*node.next_functions, *getattr(node, "detached", ())):
            if edge[0] is not None:
                users.setdefault(edge, []).append(node)
                ahead.append(edge[0])
    return users
