"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """GPUs by name with their driver, processors, and software; never the host name."""
    gpus = _gpus()
    return {
        "gpus": [name for name, _ in gpus],
        "driver": gpus[0][1] if gpus else None,
        "processor": _processor(),
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def described(found: Mapping[str, Any]) -> str:
    """The machine in a few words: its GPUs with their driver, or else its processor."""
    names = found["gpus"] or [found["processor"] or "an unnamed processor"]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds}, driver {found['driver']}" if found["driver"] else kinds


def _gpus() -> list[tuple[str, str]]:
    """(name, driver version) of each GPU in nvidia-smi's list; empty if it cannot be run."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = (line.rsplit(", ", 1) for line in done.stdout.splitlines() if ", " in line)
    return [(name, driver) for name, driver in pairs]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
