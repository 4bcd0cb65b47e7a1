"""Megatron's capturing flag, which says that a layer runs the part that its graph holds.

The flag tells a MoE layer where to stop. Megatron sets it around a capture
(``_set_capture_start``, ``_set_capture_end``), and here :func:`run_region
<megatron_cg.integrations.megatron.units.run_region>` does around that part as plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_cg.upstream.symbols import Symbol

_START, _END, _IS_CAPTURING = (
    Symbol(
        "megatron-core",
        f"megatron.core.transformer.cuda_graphs:{name}",
        "a function of Megatron's capturing flag",
    )
    for name in ("_set_capture_start", "_set_capture_end", "is_graph_capturing")
)
RELIES_ON = (_START, _END, _IS_CAPTURING)

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


@contextmanager
def capturing_flag() -> Iterator[None]:
    """Set Megatron's capturing flag in the block.

    In the backward pass of a region too: there Megatron then skips its own recomputation
    (megatron-core 0.19.2).
    """
    _START.cached()
    try:
        yield
    finally:
        _END.cached()


def is_running_region() -> bool:
    """Whether a region or a capture is running."""
    return bool(_IS_CAPTURING.cached())


def is_capturing() -> bool:
    """Whether a capture runs, warmup included; False in :func:`not_capturing`."""
    return is_running_region() and _eager_regions == 0
