"""What surrounds a unit's call: autocast, and activation checkpointing.

Note [Casts that autocast caches]
    With its cache, autocast casts a weight once in a forward pass, so gradients of all its uses are
    summed in the lower precision. A unit is captured with the cache that it was seen with, since
    without one they would be summed in the weight's own. No pass may find the casts of another: a
    graph would read them at the address that they had at capture. So a cast that two calls of units
    share is refused. So is a backward pass under the same autocast if weights are gathered for each
    pass: a later microbatch would use the casts of an earlier one.

Note [Checkpointing around a unit]
    Activation checkpointing around a unit calls it again in the backward pass. The form without
    reentrance (torch 2.11, ``torch/utils/checkpoint.py``) pairs the tensors that the two passes
    save for backward by their number, through saved-tensor hooks. A replay saves none. So if one
    pass is a replay and the other is eager, tensors are paired wrongly: gradients are wrong, and no
    error follows. Both passes are told here, and both run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from megatron_cg.replay.guard import Mismatch
from megatron_cg.upstream.backward_pass import in_backward_pass
from megatron_cg.upstream.symbols import Symbol

_HOOKS = Symbol(
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "the saved-tensor hooks that apply now, or None",
)
RELIES_ON = (_HOOKS,)


@dataclass(frozen=True)
class AutocastState:
    """``torch.autocast`` of one device type."""

    device_type: str
    dtype: torch.dtype | None
    """None if it is off."""
    has_cache: bool

    @classmethod
    def now(cls, device_type: str) -> AutocastState:
        """The state of this thread."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if enabled else None
        return cls(device_type, dtype, torch.is_autocast_cache_enabled())

    def entered(self, *, has_cache: bool | None = None) -> torch.autocast:
        """A context in which the state holds, with its own cache if ``has_cache`` is None."""
        return torch.autocast(
            self.device_type,
            self.dtype,
            enabled=self.dtype is not None,
            cache_enabled=self.has_cache if has_cache is None else has_cache,
        )


@cache  # Each replay asks, and a lookup takes longer than the call.
def _hooks() -> Callable[[bool], Any]:
    hooks: Callable[[bool], Any] = _HOOKS.find()
    return hooks


def recompute_around() -> str | None:
    """What shows that a call made now is, or will be, recomputed; None if nothing does."""
    if in_backward_pass():
        return "inside a backward pass"
    if _hooks()(False) is not None:  # False: also while a trace is made
        return "under saved-tensor hooks"
    return None


def not_recomputed() -> Mismatch | None:
    """A mismatch if the call made now must not be a replay."""
    shown = recompute_around()
    if shown is None:
        return None
    return Mismatch(
        "recompute",
        "the place of its call",
        "outside of backward passes and of saved-tensor hooks",
        shown,
        "Activation checkpointing around a unit does so, and a replay saves no tensors for it. "
        "Leave the unit out of units, or put the checkpoint inside the unit.",
    )
