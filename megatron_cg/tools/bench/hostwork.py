"""What each host thread did at every moment: the innermost of its nested events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.timeline import RUNTIME, Event

PREFIX = "cg: "
"""Begins the name of every range that the benchmark itself puts into a trace."""
OUTSIDE = "outside any phase"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one thread; nothing inside it has an event of its own."""

    start: float
    end: float
    name: str
    """The innermost event: an operator, a call of CUDA, or a phase where only Python runs."""
    phase: str
    """The innermost of the benchmark's own ranges, without the prefix."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a call of CUDA was made."""

    operator: str
    """The innermost operator or phase around it."""
    phase: str


@dataclass
class _Open:
    event: Event
    end: float
    phase: str


class HostWork:
    """Of one thread, from its events sorted by start and, at the same start, the longest first."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.segments: list[Segment] = []
        self.callers: dict[int, Caller] = {}
        """By correlation."""
        self._open: list[_Open] = []
        self._now = 0.0
        for event in events:
            self._close_until(event.start)
            self._begin(event)
        self._close_until(float("inf"))

    def _begin(self, event: Event) -> None:
        outer = self._open[-1] if self._open else None
        phase = outer.phase if outer else OUTSIDE
        if outer is not None:
            self._note(outer, event.start)
            if event.category in RUNTIME and event.correlation is not None:
                self.callers[event.correlation] = Caller(shown(outer.event.name), phase)
        elif event.category in RUNTIME and event.correlation is not None:
            self.callers[event.correlation] = Caller(OUTSIDE, phase)
        if event.name.startswith(PREFIX):
            phase = shown(event.name)
        # Ranges of one thread nest; what sticks out is a matter of the clock's grain.
        end = min(event.end, outer.end) if outer else event.end
        self._open.append(_Open(event, end, phase))
        self._now = event.start

    def _close_until(self, moment: float) -> None:
        while self._open and self._open[-1].end <= moment:
            top = self._open.pop()
            self._note(top, top.end)

    def _note(self, top: _Open, until: float) -> None:
        if until > self._now:
            self.segments.append(Segment(self._now, until, shown(top.event.name), top.phase))
        self._now = max(self._now, until)


def shown(name: str) -> str:
    """An event's name as tables have it."""
    return name.removeprefix(PREFIX)
