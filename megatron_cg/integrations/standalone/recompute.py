"""Whether a unit's call is one that activation checkpointing makes, or that others' hooks surround.

Note [Checkpointing around a unit]
    Activation checkpointing around a unit calls it again in the backward pass. The form without
    reentrance (torch 2.11, ``torch/utils/checkpoint.py``) pairs the tensors that the two passes
    save for backward by their number, through saved-tensor hooks. A replay saves none. So if one
    pass is a replay and the other is eager, tensors are paired wrongly: gradients are wrong, and no
    error follows. Both passes are told here, and both run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron_cg.replay.guard import Mismatch
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.symbols import Symbol

_HOOKS = Symbol(
    "torch",
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "the saved-tensor hooks that apply now, or None",
)
RELIES_ON = (_HOOKS,)


@cache  # Each replay asks, and a lookup takes longer than the call.
def _hooks() -> Callable[[bool], Any]:
    found: Callable[[bool], Any] = _HOOKS.find()
    return found


def recompute_around() -> str | None:
    """What shows that a call made now is, or will be, recomputed; None if nothing does."""
    if in_backward_pass():
        return "inside a backward pass"
    if _hooks()(False) is not None:  # False: also while a trace is made
        return "under saved-tensor hooks"
    return None


def not_recomputed() -> Mismatch | None:
    """A mismatch if the call made now must not be a replay; see the note above."""
    found = recompute_around()
    if found is None:
        return None
    return Mismatch(
        "recompute",
        "the place of its call",
        "outside of backward passes and of saved-tensor hooks",
        found,
        "Activation checkpointing around a unit does so, and a replay saves no tensors for it. "
        "Leave the unit out of units, or put the checkpoint inside the unit.",
    )
