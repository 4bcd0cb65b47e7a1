"""Reports one capture to the user: progress, seconds and memory by phase, and a summary line.

Nothing here waits for the GPU or queries it. Times are host times. Memory is what torch's allocator
has on record.

Note [The highest memory during capture]
    torch records the highest memory since the process began. A reset would change the peak in
    Megatron's own log. If the recorded peak rises during capture, it is the peak of the capture.
    Otherwise the report uses the highest memory that was seen after a pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.events import (
    CaptureBegan,
    CaptureEnded,
    Event,
    GraphsDeleted,
    PassEnded,
    PassesBegin,
    PassesDone,
    StepRepeated,
    subscribe,
)
from megatron_cg.replay.counters import Counters
from megatron_cg.telemetry.coverage_lines import coverage
from megatron_cg.telemetry.memory_lines import memory
from megatron_cg.telemetry.progress import CaptureBar, capture_bar, is_first_rank
from megatron_cg.telemetry.record import add_capture, follow, note, note_capture
from megatron_cg.upstream.patch import applied

logger = logging.getLogger(__name__)

PHASES = ("prepare", "warm up", "capture", "publish", "vote")
"""The phases of a capture's seconds; the other phases exclude voting."""
MIB = 2**20


class CaptureReport:
    """One capture, from :class:`CaptureBegan` to :class:`CaptureEnded`."""

    def __init__(self, began: CaptureBegan) -> None:
        self._model, self._units, self._votes = began.model, tuple(began.units), began.votes
        self._bar: CaptureBar | None = None
        self._memory = {"before": memory()}
        self._highest = 0
        self._warmup = self._done = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter(), self._voted()

    def hear(self, event: Event) -> None:
        """Process an event after the first one."""
        match event:
            case PassesBegin():
                self._pass_to("prepare")
                self._warmup = event.warmup
                self._bar = capture_bar(event.total, event.warmup)
            case PassEnded():
                self._count_pass()
            case PassesDone():
                self._pass_to("capture")
                self._memory["captured"] = memory()
            case CaptureEnded(counters=counters, error=None):
                self._finish(counters)
            case CaptureEnded(error=error):
                self._end()
                add_capture(self._entry() | {"error": f"{type(error).__name__}: {error}"})

    def _count_pass(self) -> None:
        self._done += 1
        self._look_at_memory()
        if self._bar is not None:
            self._bar.advance()
        if self._done == self._warmup:
            self._pass_to("warm up")
            self._memory["warmed up"] = memory()

    def _finish(self, counters: Counters) -> None:
        """All graphs are complete and replay from now on; ``counters`` belong to their session."""
        self._end()
        entry = self._entry() | {
            "layers": len(self._units),
            "graphs": sum(len(getattr(unit.layer, "cuda_graphs", ())) for unit in self._units),
            "coverage": self._coverage(),
            "patches": [change._asdict() for change in applied()],
        }
        follow(counters, self._votes)
        add_capture(entry)
        note_capture()
        if self._units and is_first_rank():
            print(f"megatron_cg: {summary(entry)}", flush=True)

    def _entry(self) -> dict[str, Any]:
        return {
            "seconds": dict(self._seconds),
            "memory": self._memory,
            "layers": 0,
            "graphs": 0,
            "coverage": [],
            "error": None,
        }

    def _coverage(self) -> list[dict[str, Any]]:
        """The coverage rows; empty if Megatron is not as relied on, as the graphs work anyway."""
        try:
            return coverage(self._model, self._units)
        except UpstreamChangedError as error:
            logger.warning("megatron_cg: what was graphed is not recorded: %s", error)
            return []

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._pass_to("publish")
        self._memory["after"] = memory()
        self._memory["highest"] = self._highest_memory()

    def _pass_to(self, phase: str) -> None:
        """Add the time since the last call to ``phase``, without the time of votes."""
        since, voted = self._since
        self._since = now, voted_now = time.perf_counter(), self._voted()
        self._seconds["vote"] += voted_now - voted
        self._seconds[phase] += now - since - (voted_now - voted)

    def _voted(self) -> float:
        spent = self._votes
        if spent is None:
            return 0.0
        return float(spent.waiting_ms + spent.exchanging_ms + spent.issuing_ms) / 1e3

    def _look_at_memory(self) -> None:
        now = memory()
        if now is not None:
            self._highest = max(self._highest, now["allocated_bytes"])

    def _highest_memory(self) -> dict[str, int] | None:
        """See Note [The highest memory during capture]."""
        before, after = self._memory["before"], self._memory["after"]
        if before is None or after is None:
            return None
        rose = after["peak_allocated_bytes"] > before["peak_allocated_bytes"]
        highest = after["peak_allocated_bytes"] if rose else self._highest
        return {"allocated_bytes": highest, "exact": int(rose)}


def summary(capture: Mapping[str, Any]) -> str:
    """A summary line of an entry of a record's ``captures``."""
    seconds = capture["seconds"]
    parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in PHASES if seconds[name] >= 0.05)
    text = (
        f"{_count(capture['graphs'], 'graph')} of {_count(capture['layers'], 'layer')} captured "
        f"in {sum(seconds.values()):.1f} s{f' ({parts})' if parts else ''}"
    )
    before, after = capture["memory"]["before"], capture["memory"]["after"]
    if before is None or after is None:
        return f"{text}; no GPU memory, since no GPU is used"
    allocated, reserved = (
        (after[name] - before[name]) / MIB for name in ("allocated_bytes", "reserved_bytes")
    )
    return f"{text}; {allocated:+.0f} MiB of GPU memory allocated, {reserved:+.0f} MiB reserved"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


_under_way: list[CaptureReport] = []
_following: list[Callable[[], None]] = []


def follow_captures() -> None:
    """Report the captures and deletions of this process from now on; a second call does nothing."""
    if not _following:
        _following.append(subscribe(_hear))


def repeated(event: StepRepeated) -> str:
    """A line about a step that was repeated."""
    step = "a step" if event.step is None else f"step {event.step}"
    return (
        f"{step} repeated: a rank had {event.rows:,} rows for another in a MoE layer, bound "
        f"{event.bound:,}. With --cg-moe-rows {event.enough:g} or more it would have fitted."
    )


def _hear(event: Event) -> None:
    if isinstance(event, CaptureBegan):
        _under_way[:] = [CaptureReport(event)]
    elif isinstance(event, GraphsDeleted):
        note("graphs", event.total.as_dict())
        note("agreement", event.votes.as_dict())
        if is_first_rank():
            counts = counts_text(event.counters.as_dict())
            print(f"megatron_cg: graphs of rank 0: {counts}. {event.votes.text()}.", flush=True)
    elif isinstance(event, StepRepeated):
        if is_first_rank():
            logger.warning("megatron_cg: %s", repeated(event))
    elif _under_way:
        _under_way[0].hear(event)
        if isinstance(event, CaptureEnded):
            _under_way.clear()


def counts_text(counts: Mapping[str, int]) -> str:
    """The counts, by the names of :class:`Counters`, as one line of text; 1 MiB is 2**20 bytes."""
    passes = ("captured", "replayed", "eager", "mismatched", "verified")
    words = ", ".join(f"{counts.get(name, 0)} {name}" for name in passes)
    replayed = counts.get("replayed", 0)
    if not replayed:
        return words
    copied = counts.get("bytes_copied", 0) / replayed / 2**20
    guard = counts.get("guard_ns", 0) / replayed / 1e3
    backwards = counts.get("backwards", 0) or 1
    back = counts.get("gradient_bytes_copied", 0) / backwards / 2**20
    return (
        f"{words}; a replay: {counts.get('inputs_in_place', 0) / replayed:.1f} inputs in place, "
        f"{counts.get('inputs_copied', 0) / replayed:.1f} copied ({copied:.2f} MiB), backward "
        f"{counts.get('gradients_copied', 0) / backwards:.1f} copied ({back:.2f} MiB), "
        f"{guard:.0f} us in guards"
    )
