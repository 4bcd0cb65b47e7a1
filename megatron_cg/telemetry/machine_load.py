"""Describes the machine of a run in words, without the host name."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

_PREFIXES = ("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_NCCL_", "MAMBA_")
_DRIVER = Path("/proc/driver/nvidia/version")


def machine() -> dict[str, Any]:
    """GPUs visible to this process, their driver, processors and libraries; None: there is none."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "gpu_bytes": torch.cuda.get_device_properties().total_memory if gpu else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "nccl": _nccl() if gpu else None,
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def variables() -> dict[str, str]:
    """The environment variables that affect CUDA, NCCL, TE and the allocator."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIXES)}


def _driver() -> str | None:
    """The NVIDIA driver's version, as the kernel module reports it."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group() if found else None


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    version: Any = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
