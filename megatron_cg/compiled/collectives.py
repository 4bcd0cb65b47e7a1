"""Collectives that can be traced, in place of those that cannot.

Dynamo traces torch's collectives as functional ones, but refuses ``async_op=True`` (torch 2.11 to
2.15). Inside :func:`traceable` an asynchronous collective is issued and waited for at once, and its
handle is done. Numbers are the same; what ran beside the collective now runs after it.

Note [A tensor that a Function returns and has twice]
    torch 2.11 gives silently zero gradients where a traced ``autograd.Function`` returns a tensor
    that its forward has under two names (pytorch/pytorch#180642): one that it has written in place,
    or that ``contiguous()`` or ``to()`` have returned as it was. Dynamo makes both names outputs of
    the traced function, and the gradient of one is lost. Megatron's mappings do this: they allocate
    an output, let a collective write it, and return it. The replacements return a functional
    collective's own result. ``graph_checks.py`` refuses such a Function anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol, installed_version

_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_LAYERS = "megatron.core.tensor_parallel.layers"

_REDUCE = Symbol(
    "megatron-core",
    f"{_MAPPINGS}:_reduce",
    "all-reduces its input in place",
    parameters=("input_", "group"),
    fingerprints=("354fa3ca19004b07",),
)
_GATHER_FIRST = Symbol(
    "megatron-core",
    f"{_MAPPINGS}:_gather_along_first_dim",
    "all-gathers along the first dimension",
    parameters=("input_", "group", "output_split_sizes", "use_global_buffer"),
    fingerprints=("a4e3ac604c4824f4",),
)
_GATHER_LAST = Symbol(
    "megatron-core",
    f"{_MAPPINGS}:_gather_along_last_dim",
    "all-gathers along the last dimension",
    parameters=("input_", "group"),
    fingerprints=("ae4793e64e8fd3a9",),
)
_SCATTER_FIRST = Symbol(
    "megatron-core",
    f"{_MAPPINGS}:_reduce_scatter_along_first_dim",
    "reduce-scatters along the first dimension",
    parameters=("input_", "group", "input_split_sizes", "use_global_buffer"),
    fingerprints=("b16fab690c1237cd",),
)
_ALL_TO_ALL = Symbol(
    "megatron-core",
    f"{_MAPPINGS}:_AllToAll.forward",
    "exchanges rows between all ranks of a group",
    parameters=("ctx", "group", "input", "output_split_sizes", "input_split_sizes"),
    fingerprints=("11b09017a57255c0",),
)
_BUFFER = Symbol(
    "megatron-core",
    "megatron.core.utils:GlobalMemoryBuffer.get_tensor",
    "returns memory that layers share, with any content",
    fingerprints=("517236bbbf6756e2",),
)
_FORK = Symbol(
    "megatron-core",
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
    "draws from another random state in a block",
    fingerprints=("b6ca8a68776218dc",),
)
_RANDOM = "megatron.core.tensor_parallel.random"
_TRACKER = Symbol(
    "megatron-core", f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", "the tracker of random states, or None"
)
_TRACKER_MADE = Symbol(
    "megatron-core", f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED", "whether there is a tracker"
)
_TRACKER_CLASS = Symbol(
    "megatron-core", f"{_RANDOM}:CudaRNGStatesTracker", "a tracker of random states"
)
_WARNED = Symbol(
    "megatron-core",
    f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce.warned",
    "is set while it is traced, once it has warned",
)
_CAUSAL = Symbol(
    "megatron-core",
    "megatron.core.fusions.fused_softmax:get_default_causal_mask",
    "makes the mask of a layer that gets none, on a device by name",
    fingerprints=("4b98020062c1e495",),
)
_BOUND = tuple(
    Symbol("megatron-core", f"{module}:{name}", "a collective of torch, bound at import")
    for module in (_MAPPINGS, _LAYERS)
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func")
)
RELIES_ON = (
    *(_REDUCE, _GATHER_FIRST, _GATHER_LAST, _SCATTER_FIRST, _ALL_TO_ALL, _BUFFER, _FORK),
    *(_TRACKER, _TRACKER_MADE, _TRACKER_CLASS, _WARNED, _CAUSAL),
    *_BOUND,
)

_ASYNCHRONOUS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
)
"""The collectives of ``torch.distributed`` that Dynamo can rewrite."""


class Finished:
    """The handle of a collective that is done."""

    def wait(self, _timeout: Any = None) -> bool:
        """Return at once."""
        return True


def _done_at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective`` for tracing: ``async_op=True`` returns a handle that is done."""

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        collective(*args, **kwargs)
        return Finished() if async_op else None

    return call


@contextmanager
def traceable() -> Iterator[None]:
    """Install the replacements, for torch and, if it is installed, for Megatron."""
    with ExitStack() as stack:
        done = {name: _done_at_once(getattr(dist, name)) for name in _ASYNCHRONOUS}
        for name, function in done.items():
            stack.callback(set_attribute(dist, name, function))
        if installed_version("megatron-core") is not None:
            _megatron(stack, done)
        yield


def _megatron(stack: ExitStack, done: dict[str, Callable[..., Any]]) -> None:
    standins: tuple[tuple[Symbol, Any], ...] = (
        (_REDUCE, _reduce),
        (_GATHER_FIRST, _gather_first(_GATHER_FIRST.find())),
        (_GATHER_LAST, _gather_last),
        (_SCATTER_FIRST, _scatter_first(_SCATTER_FIRST.find())),
        (_ALL_TO_ALL, staticmethod(_all_to_all)),
        (_BUFFER, _fresh_memory),
        (_FORK, lambda *_args, **_kwargs: nullcontext()),
        (_CAUSAL, _causal_mask),
        (_WARNED, True),
        # Or the tracer would see one being made, and every call of the code would make it again.
        (_TRACKER, _TRACKER_CLASS.find()()),
        (_TRACKER_MADE, True),
    )
    for symbol, standin in standins:
        if symbol.unknown_body() is not None:
            continue  # Megatron's own is traced; graph_checks.py refuses what is not right then.
        stack.callback(set_attribute(*symbol.place(), standin))
    for symbol in _BOUND:
        gathers = "gather" in symbol.path
        standin = done["all_gather_into_tensor" if gathers else "reduce_scatter_tensor"]
        stack.callback(set_attribute(*symbol.place(), standin))


def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() == 1:
        return input_
    reduced: torch.Tensor = functional.all_reduce(input_.contiguous(), "sum", group)
    return reduced


def _gather_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if group.size() == 1 or sizes is not None:
            return original(input_, group, sizes, use_global_buffer)
        return functional.all_gather_tensor(input_.contiguous(), 0, group)

    return gather


def _gather_last(input_: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() == 1:
        return input_
    rows = functional.all_gather_tensor(input_.contiguous(), 0, group)
    return torch.cat(rows.chunk(group.size(), dim=0), dim=-1)


def _scatter_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if group.size() == 1 or sizes is not None:
            return original(input_, group, sizes, use_global_buffer)
        return functional.reduce_scatter_tensor(input_.contiguous(), "sum", 0, group)

    return scatter


def _all_to_all(
    ctx: Any,
    group: Any,
    rows: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """With ``options`` (output split sizes, input split sizes, whether on NCCL's stream)."""
    ctx.group = group
    ctx.output_split_sizes, ctx.input_split_sizes, ctx.use_nccl_stream = (*options, False)[:3]
    if group.size() == 1:
        return rows
    sizes = ctx.output_split_sizes, ctx.input_split_sizes
    return functional.all_to_all_single(rows.contiguous(), *sizes, group)


def _fresh_memory(
    _buffer: Any, shape: Any, dtype: torch.dtype, _name: str, _context: Any = None
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=torch.device("meta"))


def _causal_mask(length: int) -> torch.Tensor:
    ones = torch.ones(length, length, device=torch.device("meta"))
    return torch.triu(ones, diagonal=1).bool()
