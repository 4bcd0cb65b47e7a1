"""The measured runs that are most like a planned one.

Graphs remove the host's time to launch kernels, which hardly depends on sizes; the GPU's work does.
So runs are compared by the work of one layer: tokens of a microbatch on one GPU, times the layer's
parameters on that GPU that one token uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_cg.tools.plan.layers import Layer, Shape
from megatron_cg.tools.plan.settings import Settings

_ROWS = Path(__file__).with_name("measured_rows.json")


def work_per_layer(settings: Settings, layers: Sequence[Layer]) -> float:
    """The mean over the decoder's layers."""
    shape = Shape(settings.args, settings.graph, settings.run)
    decoder = [layer for layer in layers if not layer.name.startswith("MTP")]
    used = sum(part.used for layer in decoder for part in layer.parts)
    return float(shape.tokens * used / max(1, len(decoder)))


def similar_runs(settings: Settings, layers: Sequence[Layer], count: int = 2) -> list[str]:
    """A sentence for each of the ``count`` runs that are nearest."""
    work = work_per_layer(settings, layers)
    kind = "MoE" if settings.run.is_moe else "dense"
    whole = any(part.name == "experts" for layer in layers for part in layer.captured)

    def distance(row: dict[str, Any]) -> tuple[bool, bool, float]:
        holds_experts = row["captured"].endswith("moe")
        other = kind == "MoE" and holds_experts is not whole
        return row["kind"] != kind, other, abs(math.log(work / row["work_per_layer"]))

    rows = sorted(json.loads(_ROWS.read_text(encoding="utf-8")), key=distance)
    return [_sentence(row, work / row["work_per_layer"]) for row in rows[:count]]


def _sentence(row: dict[str, Any], times: float) -> str:
    return (
        f"{row['shape']}, {row['gpus']}, {row['captured']}: {row['eager_ms']:,} ms eagerly"
        f"{_busy(row, 'eager')}, {row['graphs_ms']:,} with graphs{_busy(row, 'graphs')}. A layer "
        f"here has {times:.2g} times its work ({row['results']})"
    )


def _busy(row: dict[str, Any], name: str) -> str:
    busy = row[f"{name}_busy_ms"]
    return "" if busy is None else f" (GPU busy {busy / row[f'{name}_ms']:.0%})"
