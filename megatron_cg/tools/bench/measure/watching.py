"""Observes begin and end of chosen functions in every thread, without replacing any.

Note [Local events]
    ``sys.monitoring`` (Python 3.12) calls back only for chosen code objects. Unwatched code runs at
    full speed; a watched function costs about a microsecond per call. An exception that leaves a
    function is reported only as an event of the whole interpreter; exceptions are rare enough.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

from megatron_cg.errors import MegatronCGError

_NAME = "megatron_cg.tools.bench"
_TOOLS = (4, 3, 2)
"""Ids that sys.monitoring reserves for nobody, and that of profilers (docs.python.org)."""


class WatchError(MegatronCGError):
    """Functions cannot be watched in this process."""


class Watcher(Protocol):
    """Receives the calls of watched functions."""

    def begins(self, name: str) -> None:
        """A function of that name begins in the calling thread."""

    def ends(self, name: str) -> None:
        """It ends, by return or exception. It may have begun before watching started."""


@contextmanager
def watching(codes: Mapping[CodeType, str], watcher: Watcher) -> Iterator[None]:
    """Report every call of ``codes`` in the block to ``watcher``.

    Raises WatchError if other tools hold all ids of ``sys.monitoring``.
    """
    monitoring = sys.monitoring
    tool = next((number for number in _TOOLS if monitoring.get_tool(number) is None), None)
    if tool is None:
        raise WatchError("all tools of sys.monitoring are taken: run without another profiler.")
    events = monitoring.events

    def begins(code: CodeType, _offset: int) -> Any:
        watcher.begins(codes[code])

    def ends(code: CodeType, _offset: int, _value: Any) -> Any:
        if code in codes:
            watcher.ends(codes[code])

    monitoring.use_tool_id(tool, _NAME)
    try:
        monitoring.register_callback(tool, events.PY_START, begins)
        monitoring.register_callback(tool, events.PY_RETURN, ends)
        monitoring.register_callback(tool, events.PY_UNWIND, ends)
        for code in codes:
            monitoring.set_local_events(tool, code, events.PY_START | events.PY_RETURN)
        monitoring.set_events(tool, events.PY_UNWIND)
        yield
    finally:
        monitoring.set_events(tool, events.NO_EVENTS)
        for code in codes:
            monitoring.set_local_events(tool, code, events.NO_EVENTS)
        for event in (events.PY_START, events.PY_RETURN, events.PY_UNWIND):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


@dataclass
class PhaseTime:
    """Time of one phase in one kind of thread, in nanoseconds on the host."""

    calls: int = 0
    inclusive: int = 0
    """Number of calls, without calls nested in a call of the same phase."""
    own: int = 0
    """Time excluding nested phases."""


@dataclass
class _Call:
    name: str
    began: int
    inside: int = 0


class PhaseTimes:
    """Adds up the time of each phase, for two kinds of thread, ``main`` and ``backward``.

    Autograd runs the backward pass of a GPU in its own thread.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._main = threading.get_ident()
        self._stacks: dict[int, list[_Call]] = {}
        self.times: dict[tuple[str, str], PhaseTime] = {}
        """By (phase, kind of thread)."""

    def begins(self, name: str) -> None:
        """See :class:`Watcher`."""
        stack = self._stacks.setdefault(threading.get_ident(), [])
        stack.append(_Call(name, self._clock()))

    def ends(self, name: str) -> None:
        """See :class:`Watcher`."""
        thread = threading.get_ident()
        stack = self._stacks.get(thread, [])
        if not stack or stack[-1].name != name:
            return
        call = stack.pop()
        took = self._clock() - call.began
        kind = "main" if thread == self._main else "backward"
        time_of = self.times.setdefault((name, kind), PhaseTime())
        time_of.calls += 1
        time_of.own += took - call.inside
        if all(outer.name != name for outer in stack):
            time_of.inclusive += took
        if stack:
            stack[-1].inside += took

    def per_step(self, steps: int) -> list[dict[str, Any]]:
        """Rows for JSON, times in milliseconds per step."""
        return [
            {
                "phase": phase,
                "thread": kind,
                "calls": spent.calls / steps,
                "ms": spent.inclusive / 1e6 / steps,
                "own_ms": spent.own / 1e6 / steps,
            }
            for (phase, kind), spent in sorted(self.times.items())
        ]


class PhaseRanges:
    """Adds a range around each phase to a profiler's trace.

    Args:
        make: makes a context manager for a range of that name; torch's ``record_function``.
        prefix: prefix of each name.
    """

    def __init__(self, make: Callable[[str], Any], prefix: str) -> None:
        self._make, self._prefix = make, prefix
        self._stacks: dict[int, list[tuple[str, Any]]] = {}

    def begins(self, name: str) -> None:
        """See :class:`Watcher`."""
        opened = self._make(self._prefix + name)
        opened.__enter__()
        self._stacks.setdefault(threading.get_ident(), []).append((name, opened))

    def ends(self, name: str) -> None:
        """See :class:`Watcher`."""
        stack = self._stacks.get(threading.get_ident(), [])
        if stack and stack[-1][0] == name:
            stack.pop()[1].__exit__(None, None, None)
