"""What the core tells: events, most of them during a capture, and named ranges for profilers.

The core does not know its subscribers; log and record are some (``telemetry``). A subscriber runs
in the thread that captures, so it must not queue work on the GPU or wait for it. An exception in a
subscriber propagates to the core as an error of capture.

``torch.profiler`` shows ranges as ``megatron_cg: <range>``, and so does Nsight Systems inside
``torch.autograd.profiler.emit_nvtx``, which Megatron's ``--profile`` enters. Without a profiler, a
range costs one check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function


@dataclass(frozen=True)
class CaptureBegan:
    """A capture of one model's units begins; nothing has been changed yet."""

    units: Sequence[Any]
    """:class:`megatron_cg.replay.unit.Unit`, in the order of their forward passes."""


@dataclass(frozen=True)
class CaptureEnded:
    """All graphs replay from now on, or the capture failed."""

    counters: Any = None
    """The session's ``Counters``; None if ``error`` is given."""
    error: BaseException | None = None
    fast_path: Any = None
    """The session's ``FastPath``; None if it has none."""


@dataclass(frozen=True)
class GraphsDeleted:
    counters: Any
    """``Counters`` of the session that was closed."""
    total: Any
    """``Counters`` of all sessions of this model so far."""


@dataclass(frozen=True)
class StepRepeated:
    """A rank had more rows for another than graphs have room for; the step begins once more."""

    step: int | None
    """The step, as the training loop's log counts it, from 1; None if the loop does not say."""
    rows: int
    """The most rows that a rank had for another."""
    bound: int
    """Rows that the graphs have room for."""
    enough: float
    """The factor of ``--cg-moe-rows`` with which this step fits."""


@dataclass(frozen=True)
class StepVerified:
    """A step was trained with graphs and once more eagerly."""

    step: int | None
    """As in :class:`StepRepeated`."""
    compared: str
    """What was compared, in words."""


Event = CaptureBegan | CaptureEnded | GraphsDeleted | StepRepeated | StepVerified

subscribers: list[Callable[[Event], None]] = []
"""Called for each event, in this order."""


def emit(event: Event) -> None:
    for hear in tuple(subscribers):
        hear(event)


Range = Literal[
    "capture",
    "guard",
    "verification",
    "replay",
    "eager pass",
    "vote",
    "gather weights",
    "bucket gradients",
    "clip gradients",
    "main gradients",
]
"""What a range covers. The backward pass of a replay is a node of autograd, which has its own."""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named_range(name: Range) -> AbstractContextManager[Any]:
    return record_function(f"megatron_cg: {name}") if _profiler_enabled() else _NOTHING


def in_range[**P, R](name: Range) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, so that each call is in :func:`named_range`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def in_named_range(*args: P.args, **kwargs: P.kwargs) -> R:
            with named_range(name):
                return function(*args, **kwargs)

        return in_named_range

    return decorate
