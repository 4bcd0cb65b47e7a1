"""Megatron's MoE metrics: tensors outside of a layer's modules that a graph can write to.

The router adds its losses to ``get_moe_metrics_tracker().metrics[name].values`` in the forward
pass, so a graph that contains a router writes to that tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cg.replay.guard.objects import Entry
from megatron_cg.upstream.symbols import Symbol

_MODULE = "megatron.core.transformer.moe.moe_logging"
RELIES_ON = (
    Symbol("megatron-core", f"{_MODULE}:_MOE_METRICS_TRACKER", "Megatron's MoE metrics tracker"),
    Symbol("megatron-core", f"{_MODULE}:MoEMetricsTracker", "what it is", attributes=("metrics",)),
    Symbol(
        "megatron-core", f"{_MODULE}:MetricEntry", "an entry of its metrics", attributes=("values",)
    ),
)


def metrics_tracker() -> Any:
    """Megatron's MoE metrics tracker; None before a router has recorded anything."""
    return getattr(sys.modules.get(_MODULE), "_MOE_METRICS_TRACKER", None)


def metric_entries() -> list[Entry]:
    """The tensors that accumulate MoE metrics, for the guard's table; none without MoE."""
    tracker = metrics_tracker()
    if tracker is None:
        return []
    found: list[Entry] = [
        (
            vars(sys.modules[_MODULE]),
            "_MOE_METRICS_TRACKER",
            "metrics",
            "Megatron's MoE metrics tracker",
        )
    ]
    for name, entry in tracker.metrics.items():
        what = f"the tensor of the MoE metric {name}"
        found.append((vars(entry), "values", "metrics", what))
        found.append((tracker.metrics, name, "metrics", f"the MoE metric {name}"))
    return found


@contextmanager
def metrics_kept() -> Iterator[None]:
    """Restore the sums of MoE metrics on exit, in place."""
    tracker = metrics_tracker()
    entries = list(tracker.metrics.values()) if tracker is not None else []
    saved = [(entry.values, entry.values.clone()) for entry in entries]
    try:
        yield
    finally:
        with torch.no_grad():
            for values, old in saved:
                values.copy_(old)
