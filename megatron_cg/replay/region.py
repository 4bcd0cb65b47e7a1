"""The captured region of a layer, run as plain Python.

``GraphableMegatronModule._te_cuda_graph_capture`` runs exactly the captured region and returns what
the graph returns, as long as Megatron's capturing flag is set (``_set_capture_start``,
``_set_capture_end``). The flag tells a MoE layer where to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from torch import nn

from megatron_cg.replay.guard.inputs import NOT_INPUTS
from megatron_cg.upstream.symbols import Symbol

_FLAGS = {
    name: Symbol(
        "megatron-core",
        f"megatron.core.transformer.cuda_graphs:{name}",
        "a function of Megatron's capturing flag",
    )
    for name in ("_set_capture_start", "_set_capture_end", "is_graph_capturing")
}
RELIES_ON = (
    *_FLAGS.values(),
    Symbol(
        "megatron-core",
        "megatron.core.transformer.module:GraphableMegatronModule._te_cuda_graph_capture",
        "the part of a layer that its graph holds",
    ),
)


_eager_regions = 0
"""How many blocks of :func:`not_capturing` have been entered."""


@contextmanager
def not_capturing() -> Iterator[None]:
    """In the block, a region runs the operations of an eager pass; see :func:`is_capturing`."""
    global _eager_regions
    _eager_regions += 1
    try:
        yield
    finally:
        _eager_regions -= 1


def run_region(
    layer: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    as_captured: bool = False,
) -> Any:
    """Return what the graph of ``layer`` would return for these arguments, with autograd as usual.

    FSDP's hooks on modules inside the region run as in an eager pass. With ``as_captured``, experts
    run the operations that a graph would hold; see :func:`is_capturing`.
    """
    target: Any = layer
    inputs = {name: value for name, value in kwargs.items() if name not in NOT_INPUTS}
    with capturing_flag(), nullcontext() if as_captured else not_capturing():
        return target._te_cuda_graph_capture(*args, **inputs)


@contextmanager
def capturing_flag() -> Iterator[None]:
    """Set Megatron's capturing flag in the block.

    In the backward pass of a region too: there Megatron then skips its own recomputation
    (megatron-core 0.19.2).
    """
    _flag("_set_capture_start")()
    try:
        yield
    finally:
        _flag("_set_capture_end")()


def is_running_region() -> bool:
    """Whether :func:`run_region` or a capture is running."""
    return bool(_flag("is_graph_capturing")())


def is_capturing() -> bool:
    """Whether a capture runs, warmup included; False in :func:`not_capturing`."""
    return is_running_region() and _eager_regions == 0


@cache
def _flag(name: str) -> Callable[[], Any]:
    found: Callable[[], Any] = _FLAGS[name].find()
    return found
