"""GPU memory by the books of torch's caching allocator, which asks nothing of the GPU."""

from __future__ import annotations

import torch


def memory() -> dict[str, int] | None:
    """Bytes of this process on the current GPU, or None where it uses none.

    ``allocated_bytes`` is held by tensors and graphs, ``reserved_bytes`` also what the allocator
    keeps for later, and the two with ``peak_`` are the highest since the process began or since
    somebody reset them. Relied on: torch 2.11, ``torch.cuda.memory_stats_as_nested_dict``.
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
