"""Whether graphs are likely to pay for a planned model, from measured rows. Pure.

Note [The nearest row]
    Graphs remove the host's time to launch kernels, which hardly depends on sizes. The work of the
    GPU does. So models are compared by the work of one layer: tokens of a microbatch on one GPU,
    times the parameters of the layer on that GPU that one token uses. The nearest row is that of
    the same kind (dense or MoE) and grouped GEMM whose work is nearest by ratio. Beyond a factor
    of FAR the row tells nothing, nor where not every layer has a graph of its attention, which has
    most of the launches.

The rows of ``measured_rows.json`` are those of runs of ``megatron-cg bench``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import WHOLE_LAYER

ROWS = Path(__file__).with_name("measured_rows.json")
FAR = 4.0
PAYS = 0.95
"""Graphs pay if a step takes less than this part of an eager one."""
LIKELY, UNLIKELY, UNKNOWN = "likely", "unlikely", "unknown"
_MEASURE = "megatron-cg bench measures it on your GPUs."


@dataclass(frozen=True)
class Planned:
    """What decides which row is nearest."""

    kind: str
    """``dense``, ``MoE`` or ``hybrid``."""
    dtype: str
    grouped_gemm: str
    """``default``, ``cutlass`` or ``torch``; a dense model has ``default``."""
    work_per_layer: float
    scopes: frozenset[str]
    """The captured scopes."""
    attention: bool
    """Whether the attention of every layer is in a graph."""
    launches_saved: int
    """Kernel launches that graphs save in a step."""


def measured_rows() -> list[dict[str, Any]]:
    """The measured rows that come with this package."""
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return rows


def worth(planned: Planned, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``verdict`` (likely, unlikely or unknown), ``text``, and ``row``, the nearest or None."""
    kin = [
        row
        for row in rows
        if (row["kind"], row["dtype"], row["grouped_gemm"])
        == (planned.kind, planned.dtype, planned.grouped_gemm)
    ]
    if not kin:
        gemm = "" if planned.grouped_gemm == "default" else f", grouped GEMM {planned.grouped_gemm}"
        return _told(UNKNOWN, [f"No {planned.kind} model in {planned.dtype}{gemm} was measured"])
    row = min(kin, key=lambda row: abs(math.log(planned.work_per_layer / row["work_per_layer"])))
    times = planned.work_per_layer / row["work_per_layer"]
    words = [
        f"Nearest measured row: {_described(row)}",
        f"A layer here has {times:.2g} times its work",
    ]
    if not 1 / FAR <= times <= FAR:
        words[-1] += f", which is beyond a factor of {FAR:g}"
        return _told(UNKNOWN, words, row)
    if not planned.attention:
        words.append("There, the attention of every layer was in a graph, and here it is not")
        return _told(UNKNOWN, words, row)
    if row["least"] <= PAYS <= row["most"]:
        return _told(UNKNOWN, [*words, "Its rounds do not agree"], row)
    words[-1] += f", and graphs save {planned.launches_saved:,} kernel launches a step"
    # The scope moe holds what the router's scopes hold.
    whole = {"moe_router", "moe_preprocess"} if "moe" in planned.scopes else set()
    missing = [scope for scope in row["scopes"] if scope not in planned.scopes | whole]
    if missing and WHOLE_LAYER not in planned.scopes:
        words.append(f"The row captured {' '.join(missing)} too, so expect less")
    return _told(LIKELY if row["most"] < PAYS else UNLIKELY, words, row)


def _told(
    verdict: str, words: Sequence[str], row: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    head = {
        LIKELY: "Graphs are likely to pay",
        UNLIKELY: "Graphs are unlikely to pay",
        UNKNOWN: "Whether graphs pay is unknown",
    }[verdict]
    text = ". ".join([head, *words, _MEASURE])
    return {"verdict": verdict, "text": text, "row": None if row is None else dict(row)}


def _described(row: Mapping[str, Any]) -> str:
    rounds = (
        "one round"
        if row["rounds"] == 1
        else f"{row['least']:.2f} to {row['most']:.2f} in {row['rounds']} rounds"
    )
    caches = "" if row["same_cache"] else ", cuBLASLt's cache perhaps larger with graphs"
    return (
        f"{row['shape']} on {row['gpus']}, {row['ratio']:.2f} of an eager step ({rounds}{caches}; "
        f"{row['results']}, {row['began']})"
    )
