"""Tells the user of captures and of what graphs did, in a line of rank 0's log and in the record.

Nothing here waits for the GPU or queries it. Times are host times. Memory is what torch's allocator
has on record.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron_cg.events import (
    CaptureBegan,
    CaptureEnded,
    Event,
    GraphsDeleted,
    StepRepeated,
    StepVerified,
    subscribers,
)
from megatron_cg.telemetry.record import Memory, add_capture, memory, note

logger = logging.getLogger(__name__)

_MIB = 2**20


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
_said_what_is_compared: list[str] = []


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
    elif isinstance(event, StepVerified):
        if is_first_rank() and not _said_what_is_compared:
            _said_what_is_compared.append(event.compared)
            step = "a step" if event.step is None else f"step {event.step}"
            print(
                f"megatron_cg: {step} verified: trained with graphs and then eagerly, and compared "
                f"bit for bit: {event.compared}. Said once.",
                flush=True,
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
        "fast_path": None if path is None else {"on": path.parts, "off": path.left_out},
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }
    add_capture(entry)
    if error is None and began.units and is_first_rank():
        print(f"megatron_cg: {_summary(entry)}", flush=True)


def is_first_rank() -> bool:
    """Whether this process prints: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def counts_text(counts: Mapping[str, int]) -> str:
    """The counts, by the names of :class:`Counters`, as one line of text."""
    passes = ("captured", "replayed", "eager", "mismatched", "verified")
    text = ", ".join(f"{counts.get(name, 0)} {name}" for name in passes)
    text = f"{text} with gradients, {counts.get('outputs_only', 0)} in outputs only"
    if unstable := counts.get("gradients_unstable"):
        text += f" ({unstable} unstable results left out)"
    steps = counts.get("steps_verified")
    return f"{text}, {steps} steps verified" if steps else text
