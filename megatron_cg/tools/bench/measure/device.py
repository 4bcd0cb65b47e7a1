"""Queries the accelerator during training; does nothing without one."""

from __future__ import annotations

import torch


def synchronize() -> None:
    """Wait for all work of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, int] | None:
    """Bytes of torch's allocator now, and the peak since :func:`reset_peaks`; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        # Includes CUDA's, its graphs' and NCCL's memory outside the allocator, and other processes.
        "device_in_use": total - free,
    }


def reset_peaks() -> None:
    """Restart the peaks from now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
