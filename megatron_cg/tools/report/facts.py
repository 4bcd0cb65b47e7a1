"""Versions, machine and environment of the runs, side by side. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_cg.tools.report.story import Story
from megatron_cg.tools.report.words import count

_NONE = "none"
_MACHINE = {
    "gpus": "GPUs seen",
    "gpu_bytes": "memory of a GPU",
    "driver": "driver",
    "cuda": "CUDA of torch",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "processors": "processors",
    "system": "system",
    "python": "Python",
}


def facts(story: Story) -> list[list[str]]:
    """Rows of a name and its value in each run."""
    columns = [_facts(record) for _, record in story.records]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, _NONE) for column in columns)] for name in names]


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(value) for name, value in record.get("versions", {}).items()}
    found["device"] = _text(record.get("device"))
    machine = dict(record.get("machine", {}))
    if machine.get("gpu_bytes"):
        machine["gpu_bytes"] = f"{machine['gpu_bytes'] / 2**30:.0f} GiB"
    found |= {name: _text(machine[key]) for key, name in _MACHINE.items() if key in machine}
    found |= {name: _text(v) for name, v in record.get("environment", {}).items()}
    return found | {"scopes in graphs": _graphed(record)}


def _graphed(record: Mapping[str, Any]) -> str:
    """The scopes in the last capture, each with the number of layers whose graph has it."""
    if "captures" not in record:
        return "not recorded"
    made = [capture for capture in record["captures"] if capture["graphs"]]
    rows = made[-1]["coverage"] if made else ()
    layers = Counter(scope for row in rows for scope in row["graphed"])
    return ", ".join(f"{scope} of {count(n, 'layer')}" for scope, n in layers.items()) or _NONE


def _text(value: Any) -> str:
    return _NONE if value is None else str(value) or "empty"
