"""Megatron's RNG tracker, as far as it is in use; nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def megatron_tracker() -> Any:
    """Megatron's RNG tracker if Megatron is in use (megatron-core 0.19.2), else None."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if module is None else module.get_cuda_rng_tracker()


@contextmanager
def tracked_states_kept() -> Iterator[None]:
    """Restore which states Megatron's tracker holds; a fork replaces them."""
    tracker = megatron_tracker()
    tracked = dict(tracker.states_) if tracker is not None else {}
    try:
        yield
    finally:
        if tracker is not None:
            tracker.states_.clear()
            tracker.states_.update(tracked)
