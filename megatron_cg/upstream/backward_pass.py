"""Whether, and which, backward pass of autograd is under way in this thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from megatron_cg.upstream.symbols import Symbol

CURRENT_PASS = Symbol(
    "torch", "torch._C:_current_graph_task_id", "which backward pass is under way"
)
NO_PASS = -1
"""What it returns outside of backward passes."""
RELIES_ON = (CURRENT_PASS,)


@cache  # Each replay asks, and a lookup takes longer than the call.
def _current_pass() -> Callable[[], int]:
    found: Callable[[], int] = CURRENT_PASS.find()
    return found


def in_backward_pass() -> bool:
    """Whether the caller runs in a backward pass."""
    return _current_pass()() != NO_PASS
