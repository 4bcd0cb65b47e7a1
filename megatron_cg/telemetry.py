"""What a run says: lines of rank 0's log, counters in Megatron's log, its records.

Nothing here waits for the GPU or queries it: times are the host's, memory is that of torch's
allocator. Megatron looks up ``training_log`` as a global of its module after each step; its
parameter ``iteration`` counts steps from 1.
"""

import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.upstream.patch import Undo, run_instead
from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:
    from megatron_cg.fastpath.install_parts import FastPath
    from megatron_cg.tools.record.record import Recorder

logger = logging.getLogger(__name__)

_sinks: "list[Recorder]" = []


def is_recorded() -> bool:
    return bool(_sinks)


def note(key: str, value: Any) -> None:
    """Store ``value``, anything JSON can hold, under ``key`` in this rank's record.

    Does nothing when nothing is recorded. A note made after training is written too.
    """
    for sink in _sinks:
        sink.note(key, value)


def record_to(sink: "Recorder") -> Undo:
    """Send notes and captures to ``sink`` until the returned function is called."""
    _sinks.append(sink)
    return partial(_sinks.remove, sink)


def memory() -> dict[str, int] | None:
    """Bytes of this process on the current GPU, or None if it uses none.

    Tensors and graphs hold ``allocated_bytes``; ``reserved_bytes`` also includes the cache.
    """
    if not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats()
    return {one: stats[f"{one}.all.current"] for one in ("allocated_bytes", "reserved_bytes")}


def is_first_rank() -> bool:
    """Whether this process prints: rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _print(text: str) -> None:
    if is_first_rank():
        print(f"megatron_cg: {text}", flush=True)


class CaptureReport:
    """What is said of one capture, which begins now and has these ``units``."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._units, self._before, self._since = len(units), memory(), time.perf_counter()

    def ended(
        self, graphs: int = 0, path: "FastPath | None" = None, error: BaseException | None = None
    ) -> None:
        """So many graphs replay from now on, by a fast path if there is one, or it failed."""
        seconds, before, after = time.perf_counter() - self._since, self._before, memory()
        layers = self._units if error is None else 0
        entry = {
            "seconds": seconds,
            "memory": {"before": before, "after": after},
            "layers": layers,
            "graphs": graphs,
            "fast_path": None if path is None else {"on": path.parts, "off": path.left_out},
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        for sink in _sinks:
            sink.add_capture(entry)
        if layers:
            used = "no GPU memory, since no GPU is used"
            if before is not None and after is not None:
                allocated, reserved = ((after[name] - before[name]) / 2**20 for name in after)
                used = f"{allocated:+.0f} MiB of GPU memory allocated, {reserved:+.0f} MiB reserved"
            _print(f"graphs captured: {graphs}, of {layers} layers, in {seconds:.1f} s; {used}")


def graphs_deleted(counters: Counters, total: Counters) -> None:
    """Report the counts of graphs that are deleted, and of all of this model so far."""
    note("graphs", total.as_dict())
    _print(f"graphs of rank 0: {counts_text(counters.as_dict())}.")


def step_repeated(step: int | None, why: object) -> None:
    """Report a step that is trained again. ``step`` is as in the log; None if unknown."""
    if is_first_rank():
        logger.warning(f"megatron_cg: {_named(step)} repeated: {why}")


def step_verified(step: int | None, compared: str) -> None:
    """Say once what was compared of a step that was trained by graphs and then eagerly."""
    if not _said_what_is_compared:
        _said_what_is_compared.append(compared)
        _print(
            f"{_named(step)} verified: trained with graphs and then eagerly, and compared "
            f"bit for bit: {compared}. Said once."
        )


_said_what_is_compared: list[str] = []


def _named(step: int | None) -> str:
    return "a step" if step is None else f"step {step}"


def counts_text(counts: Mapping[str, int]) -> str:
    """The counts, by the names of :class:`Counters`; of those behind the first four, not zero."""
    shown = {name: counts.get(name, 0) for name in _SHOWN}
    named = {name: count for name, count in shown.items() if count or name in _SHOWN[:4]}
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in named.items())


_TRAINING = "megatron.training.training"
_LOG = Symbol(f"{_TRAINING}:training_log", "what logs after each step", parameters=("iteration",))
_PRINT = Symbol(f"{_TRAINING}:print_rank_last", "what prints a line of the log")
_ARGS = Symbol("megatron.training.global_vars:get_args", "the run's arguments")
RELIES_ON = (_LOG, _PRINT, _ARGS)

_SHOWN = tuple(name for name in Counters() if name not in ("backwards", "steps_differed"))


def follow_log(counted: Callable[[], Sequence[Counters]]) -> Undo:
    """Show in Megatron's log what this rank has counted since the last line, summed over models.

    ``counted`` returns the counters of each model, at each step. Returns the undo. Raises
    UpstreamChangedError when a function of Megatron is not as relied on.
    """
    signature = inspect.signature(_LOG.find())
    get_args, print_line = _ARGS.find(), _PRINT.find()
    last = Counters()

    def log(training_log: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        result = training_log(*args, **kwargs)
        now = sum(counted(), Counters())
        iteration = int(signature.bind(*args, **kwargs).arguments["iteration"])
        if now.captured and iteration % get_args().log_interval == 0:
            new = (f"{name.replace('_', ' ')}: {now[name] - last[name]}" for name in _SHOWN)
            print_line(f" megatron_cg | {' | '.join(new)} |")
            last = now
        return result

    return run_instead(_LOG, log)
