"""Finds what each host thread did at every moment: its innermost event. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.tools.bench.traces.timeline import RUNTIME, Event

PREFIX = "cg: "
"""Prefix of every range that the benchmark itself adds to a trace."""
OUTSIDE = "outside any phase"


@dataclass(frozen=True, slots=True)
class Segment:
    """A period of one thread without any nested event."""

    start: float
    end: float
    name: str
    """The innermost event: an operator, a CUDA call, or a phase in which only Python runs."""
    phase: str
    """The innermost range of the benchmark, without the prefix."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The place of a CUDA call."""

    operator: str
    """The innermost enclosing operator or phase."""
    phase: str


@dataclass
class _Open:
    event: Event
    end: float
    phase: str


class HostWork:
    """The work of one thread, from events sorted by start; with equal starts the longest first."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.segments: list[Segment] = []
        self.callers: dict[int, Caller] = {}
        """CUDA calls by correlation id."""
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
        # Ranges of one thread nest; an end beyond the outer one comes from the clock's resolution.
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
    """An event's name as shown in tables."""
    return name.removeprefix(PREFIX)
