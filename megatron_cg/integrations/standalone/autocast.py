"""The autocast around a unit's forward and backward passes, as a step had them.

Note [Casts that autocast caches]
    With its cache, autocast casts a weight once in a forward pass, so gradients of all its uses are
    summed in the lower precision. A unit is captured with the cache that it was seen with, since
    without one they would be summed in the weight's own. No pass may find the casts of another: a
    graph would read them at the address that they had at capture. So a cast that two calls of units
    share is refused.

Relied on: torch 2.11, the names of autograd's nodes, and ``variable`` of those of leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


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

    @contextmanager
    def entered(self, *, has_cache: bool | None = None) -> Iterator[None]:
        """The state holds in the block, with its own cache if ``has_cache`` is None."""
        with torch.autocast(
            self.device_type,
            self.dtype,
            enabled=self.dtype is not None,
            cache_enabled=self.has_cache if has_cache is None else has_cache,
        ):
            yield

    def __str__(self) -> str:
        return str(self.dtype or "off")
