"""Tells the user of captures and of what graphs did, in a line of rank 0's log and in the record.

Nothing here waits for the GPU or queries it. Times are host times. Memory is what torch's allocator
has on record.

Megatron's ``_layer_is_graphable`` says whether a layer has any of the scopes of a config. Only
layers have a ``layer_number``, from 1. A layer that is captured with its own scopes sees them in a
view of its config (``upstream/megatron.py``).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_cg.arguments.schema import SCOPES, WHOLE_LAYER
from megatron_cg.events import (
    CaptureBegan,
    CaptureEnded,
    Event,
    GraphsDeleted,
    StepRepeated,
    subscribers,
)
from megatron_cg.replay.unit import Unit
from megatron_cg.telemetry.record import Memory, add_capture, memory, note
from megatron_cg.upstream.megatron import LayerConfig
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_MIB = 2**20

_TRANSFORMER = "megatron.core.transformer"
_LAYER = Symbol(f"{_TRANSFORMER}.module:GraphableMegatronModule", "layers that have scopes")
_GRAPHABLE = Symbol(
    f"{_TRANSFORMER}.cuda_graphs:_layer_is_graphable",
    "which layers have a scope",
    parameters=("layer", "config"),
)
_SCOPES = Symbol(f"{_TRANSFORMER}.enums:CudaGraphModule", "the scopes by name")
RELIES_ON = (_LAYER, _GRAPHABLE, _SCOPES)


def coverage(model: nn.Module, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row for each layer of ``model``, in order: its ``name``, ``kind`` (class) and scopes.

    ``graphed`` are the scopes in its graph. Without Megatron's layers the rows are the units, each
    graphed as a whole.
    """
    captured = {unit.layer: unit.name for unit in units}
    layers: list[Any] = []
    if f"{_TRANSFORMER}.cuda_graphs" in sys.modules:
        kind = _LAYER.find()
        layers = [m for m in model.modules() if isinstance(m, kind) and hasattr(m, "layer_number")]
    if not layers:
        return [_row(unit.name, unit.layer, [WHOLE_LAYER]) for unit in units]
    return [
        _row(captured[layer], layer, _scopes_of(layer))
        if layer in captured
        else _row(f"layer {layer.layer_number - 1}", layer, [])
        for layer in layers
    ]


def _row(name: str, layer: nn.Module, graphed: list[str]) -> dict[str, Any]:
    return {"name": name, "kind": type(layer).__name__, "graphed": graphed}


def _scopes_of(layer: Any) -> list[str]:
    asked = [getattr(module, "name", module) for module in layer.config.cuda_graph_modules or ()]
    if not asked:
        return [WHOLE_LAYER]
    config = vars(layer.config).get("_config", layer.config)
    return [
        scope
        for scope in SCOPES
        if scope in asked
        and _GRAPHABLE.find()(
            layer, LayerConfig(config, cuda_graph_modules=[_SCOPES.find()[scope]])
        )
    ]


def _summary(capture: Mapping[str, Any]) -> str:
    text = (
        f"graphs captured: {capture['graphs']}, of {capture['layers']} layers, "
        f"in {capture['seconds']:.1f} s"
    )
    before, after = capture["memory"]["before"], capture["memory"]["after"]
    if before is None or after is None:
        return f"{text}; no GPU memory, since no GPU is used"
    allocated, reserved = (
        (after[name] - before[name]) / _MIB for name in ("allocated_bytes", "reserved_bytes")
    )
    return f"{text}; {allocated:+.0f} MiB of GPU memory allocated, {reserved:+.0f} MiB reserved"


_under_way: list[tuple[CaptureBegan, Memory | None, float]] = []
"""The capture that has begun, the memory before it and when that was."""


def follow_captures() -> None:
    """Report the captures and deletions of this process from now on; a second call does nothing."""
    if _hear not in subscribers:
        subscribers.append(_hear)


def _hear(event: Event) -> None:
    if isinstance(event, CaptureBegan):
        _under_way[:] = [(event, memory(), time.perf_counter())]
    elif isinstance(event, GraphsDeleted):
        note("graphs", event.total.as_dict())
        if is_first_rank():
            counts = counts_text(event.counters.as_dict())
            print(f"megatron_cg: graphs of rank 0: {counts}.", flush=True)
    elif isinstance(event, StepRepeated):
        if is_first_rank():
            step = "a step" if event.step is None else f"step {event.step}"
            logger.warning(
                f"megatron_cg: {step} repeated: a rank had {event.rows:,} rows for another in a "
                f"MoE layer, bound {event.bound:,}. With --cg-moe-rows {event.enough:g} or more "
                "it would have fitted."
            )
    elif _under_way:
        _report(*_under_way.pop(), event)


def _report(began: CaptureBegan, before: Memory | None, since: float, ended: CaptureEnded) -> None:
    counters, error, path = ended.counters, ended.error, ended.fast_path
    entry = {
        "seconds": time.perf_counter() - since,
        "memory": {"before": before, "after": memory()},
        "layers": 0 if counters is None else len(began.units),
        "graphs": 0 if counters is None else counters.captured,
        "coverage": [] if counters is None else coverage(began.model, began.units),
        "fast_path": None if path is None else {"on": path.parts, "off": path.left_out},
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }
    add_capture(entry, counters)
    if error is None and began.units and is_first_rank():
        print(f"megatron_cg: {_summary(entry)}", flush=True)


def is_first_rank() -> bool:
    """Whether this process prints: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def counts_text(counts: Mapping[str, int]) -> str:
    """The counts, by the names of :class:`Counters`, as one line of text."""
    passes = ("captured", "replayed", "eager", "mismatched", "verified")
    return ", ".join(f"{counts.get(name, 0)} {name}" for name in passes)
