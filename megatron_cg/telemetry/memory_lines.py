"""GPU memory from the statistics of torch's caching allocator, without a query to the GPU."""

from __future__ import annotations

import torch


def memory() -> dict[str, int] | None:
    """Bytes of this process on the current GPU, or None if it uses none.

    Tensors and graphs hold ``allocated_bytes``; ``reserved_bytes`` also includes the allocator's
    cache. The two values with ``peak_`` are the highest since the process began or since the last
    reset. Relied on: torch 2.11, ``torch.cuda.memory_stats_as_nested_dict``.
    """
    if not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats_as_nested_dict()
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {
        "allocated_bytes": int(allocated["current"]),
        "reserved_bytes": int(reserved["current"]),
        "peak_allocated_bytes": int(allocated["peak"]),
        "peak_reserved_bytes": int(reserved["peak"]),
    }
