"""What is traced in place of collectives, and of other code of Megatron, that cannot be traced.

Dynamo traces torch's collectives as functional ones, but refuses ``async_op=True`` (torch 2.11 to
2.15). Inside :func:`traceable` an asynchronous collective is issued and waited for at once, and its
handle is done. Numbers are the same; what ran beside the collective now runs after it.

Note [A tensor that a Function returns and has twice]
    torch 2.11 gives silently zero gradients where a traced ``autograd.Function`` returns a tensor
    that its forward has under two names (pytorch/pytorch#180642): one that it has written in place,
    or that ``contiguous()`` or ``to()`` have returned as it was. Megatron's mappings do this: they
    allocate an output, let a collective write it, and return it. The replacements return a
    functional collective's own result. Any other such Function is refused at load, where its
    gradients are not those of eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_LAYERS = "megatron.core.tensor_parallel.layers"
_RANDOM = "megatron.core.tensor_parallel.random"


_TRACKER_CLASS = Symbol(f"{_RANDOM}:CudaRNGStatesTracker", "a tracker of random states")
_TRACKER = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER", "the tracker, or None")
_TRACKER_MADE = Symbol(f"{_RANDOM}:_CUDA_RNG_STATE_TRACKER_INITIALIZED", "whether it is made")
_WARNED = Symbol(
    f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce.warned",
    "is set while it is traced, once it has warned",
)
_BOUND = {
    Symbol(f"{module}:{ours}", "a collective of torch, bound at import"): torchs
    for module in (_MAPPINGS, _LAYERS)
    for ours, torchs in (
        ("dist_all_gather_func", "all_gather_into_tensor"),
        ("dist_reduce_scatter_func", "reduce_scatter_tensor"),
    )
}
_ASYNCHRONOUS = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single"),
    "reduce_scatter_tensor",
)
"""The collectives of ``torch.distributed`` that Dynamo can rewrite."""


@contextmanager
def traceable() -> Iterator[None]:
    """Install the replacements, for torch and for Megatron."""
    with ExitStack() as undo:
        done = {name: _done_at_once(getattr(dist, name)) for name in _ASYNCHRONOUS}
        for name, function in done.items():
            undo.callback(set_attribute(dist, name, function))
        # With a tracker, the trace does not see one being made, as every call would again.
        values = {_TRACKER: _TRACKER_CLASS.find()(), _TRACKER_MADE: True, _WARNED: True}
        values |= {symbol: done[name] for symbol, name in _BOUND.items()}
        # An unknown body is traced as it is, and compared with eager at load.
        values |= {one: _FUNCTIONS[one] for one in _FUNCTIONS if one.unknown_body() is None}
        for symbol, value in values.items():
            owner, name = symbol.place()
            is_static = isinstance(vars(owner).get(name), staticmethod)
            ours = staticmethod(value) if is_static else value
            undo.callback(set_attribute(owner, name, ours))
        yield


class _Finished:
    """The handle of a collective that is done."""

    def wait(self, _timeout: Any = None) -> bool:
        return True


def _done_at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective`` for tracing: ``async_op=True`` returns a handle that is done."""

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        collective(*args, **kwargs)
        return _Finished() if async_op else None

    return call


def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() == 1:
        return input_
    reduced: torch.Tensor = functional.all_reduce(input_.contiguous(), "sum", group)
    return reduced


def _gather_first(
    input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    if group.size() == 1:
        return input_
    _require_even(sizes)
    gathered: torch.Tensor = functional.all_gather_tensor(input_.contiguous(), 0, group)
    return gathered


def _scatter_first(
    input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    if group.size() == 1:
        return input_
    _require_even(sizes)
    rows = input_.contiguous()
    scattered: torch.Tensor = functional.reduce_scatter_tensor(rows, "sum", 0, group)
    return scattered


def _require_even(sizes: Any) -> None:
    if sizes is not None:
        raise ValueError("ranks hold different numbers of rows, which compiled code cannot gather")


def _all_to_all(ctx: Any, group: Any, rows: torch.Tensor, *options: Any) -> torch.Tensor:
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


def _no_fork(*_args: Any, **_kwargs: Any) -> Any:
    return nullcontext()


_FUNCTIONS = {
    Symbol(path, "a function that is traced otherwise", fingerprints=(fingerprint,)): function
    for function, path, fingerprint in (
        (_reduce, f"{_MAPPINGS}:_reduce", "354fa3ca19004b07"),
        (_gather_first, f"{_MAPPINGS}:_gather_along_first_dim", "a4e3ac604c4824f4"),
        (_scatter_first, f"{_MAPPINGS}:_reduce_scatter_along_first_dim", "b16fab690c1237cd"),
        (_all_to_all, f"{_MAPPINGS}:_AllToAll.forward", "11b09017a57255c0"),
        (_fresh_memory, "megatron.core.utils:GlobalMemoryBuffer.get_tensor", "517236bbbf6756e2"),
        (_no_fork, f"{_RANDOM}:CudaRNGStatesTracker.fork", "b6ca8a68776218dc"),
    )
}
RELIES_ON = (_TRACKER, _TRACKER_MADE, _TRACKER_CLASS, _WARNED, *_BOUND, *_FUNCTIONS)
