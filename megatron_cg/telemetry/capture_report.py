"""Tells the user of captures and of what graphs did: lines of rank 0's log, counters, the record.

Nothing here waits for the GPU or queries it. Times are host times. Memory is what torch's allocator
has on record.

Megatron looks up ``training_log`` as a global of its module after each step; its parameter
``iteration`` counts steps from 1. Megatron prints with ``print_rank_last``, on the rank that also
has the writers of ``megatron.training.global_vars`` for TensorBoard and Weights & Biases; they are
None on other ranks and when they are disabled.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_cg.errors import say
from megatron_cg.events import (
    CaptureBegan,
    CaptureEnded,
    Event,
    GraphsDeleted,
    StepRepeated,
    StepVerified,
    subscribers,
)
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.telemetry.sinks import Memory, add_capture, memory, note
from megatron_cg.upstream.patch import run_instead
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_MIB = 2**20
_ROWS = "{flag:--cg-moe-rows {enough:g}}"


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
                f"MoE layer, bound {event.bound:,}. With {say(_ROWS, enough=event.enough)} or more "
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


_TRAINING = "megatron.training.training"
_VARIABLES = "megatron.training.global_vars"
_LOG = Symbol(f"{_TRAINING}:training_log", "what logs after each step", parameters=("iteration",))
_PRINT = Symbol(f"{_TRAINING}:print_rank_last", "what prints a line of the log")
_ARGS = Symbol(f"{_VARIABLES}:get_args", "the run's arguments")
_TENSORBOARD = Symbol(f"{_VARIABLES}:get_tensorboard_writer", "a writer or None")
_WANDB = Symbol(f"{_VARIABLES}:get_wandb_writer", "a writer or None")
RELIES_ON = (_LOG, _PRINT, _ARGS, _TENSORBOARD, _WANDB)

_COUNTS = (
    *("captured", "replayed", "eager", "mismatched", "verified", "outputs_only"),
    *("gradients_unstable", "repeated", "steps_verified"),
)


def follow_log(counted: Callable[[], Sequence[Counters]]) -> Callable[[], None]:
    """Show counters in Megatron's log and writers; returns the undo.

    ``counted`` returns those of each model, at each step. Raises UpstreamChangedError when a
    function of Megatron is not as relied on.
    """
    signature = inspect.signature(_LOG.find())
    get_args, print_line = _ARGS.find(), _PRINT.find()
    get_tensorboard, get_wandb = _TENSORBOARD.find(), _WANDB.find()
    last: dict[str, int] = {}

    def log(training_log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        if counters := counted():
            show(counters, int(signature.bind(*args, **kwargs).arguments["iteration"]))
        return result

    def show(counters: Sequence[Counters], iteration: int) -> None:
        args, tensorboard, wandb = get_args(), get_tensorboard(), get_wandb()
        is_written = (tensorboard or wandb) and iteration % args.tensorboard_log_interval == 0
        is_printed = iteration % args.log_interval == 0
        if not (is_written or is_printed):
            return
        now = totals(counters)
        if is_written:
            values = {f"megatron_cg/{name}": value for name, value in now.items()}
            for name, value in values.items() if tensorboard else ():
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log(values, iteration)
        if is_printed and now["captured"]:
            print_line(log_line(last, now))
            last.update(now)

    return run_instead(_LOG, log)


def totals(counted: Sequence[Counters]) -> dict[str, int]:
    """The values to show, by name, summed over models: since the run began, on this rank."""
    return {name: sum(getattr(counters, name) for counters in counted) for name in _COUNTS}


def log_line(last: dict[str, int], now: dict[str, int]) -> str:
    """One line in Megatron's format: the increments since the previous line, on this rank."""
    new = {name: value - last.get(name, 0) for name, value in now.items()}
    counts = " | ".join(f"{name.replace('_', ' ')}: {new[name]}" for name in _COUNTS)
    return f" megatron_cg | {counts} |"
