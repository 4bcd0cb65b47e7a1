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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from megatron_cg.tools.bench import BenchError

_NAME = "megatron_cg.tools.bench"
_TOOLS = (4, 3, 2)
"""Ids that sys.monitoring reserves for nobody, and that of profilers (docs.python.org)."""


@dataclass
class _Call:
    phase: str
    range: AbstractContextManager[Any] | None
    began: int
    inside: int = 0
    """Time of the phases directly inside."""


class PhaseTimes:
    """Adds up the time of each phase, for two kinds of thread, ``main`` and ``backward``.

    Autograd runs the backward pass of a GPU in its own thread.

    Args:
        make_range: makes a range of that name in a profiler's trace, around each call; None makes
            none, which costs less.
        clock: nanoseconds.
    """

    def __init__(
        self,
        make_range: Callable[[str], AbstractContextManager[Any]] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._make_range, self._clock = make_range, clock
        self._main = threading.get_ident()
        self._stacks: dict[int, list[_Call]] = defaultdict(list)
        self._calls: Counter[tuple[str, str]] = Counter()
        """By (phase, kind of thread), like the times below."""
        self._whole: Counter[tuple[str, str]] = Counter()
        """Without calls nested in a call of the same phase."""
        self._own: Counter[tuple[str, str]] = Counter()
        """Without the phases inside."""

    def begins(self, phase: str) -> None:
        """A function of that phase begins in the calling thread."""
        opened = self._make_range(phase) if self._make_range else None
        if opened is not None:
            opened.__enter__()
        self._stacks[threading.get_ident()].append(_Call(phase, opened, self._clock()))

    def ends(self, phase: str) -> None:
        """It ends, by return or exception. It may have begun before this watched."""
        thread = threading.get_ident()
        stack = self._stacks[thread]
        if not stack or stack[-1].phase != phase:
            return
        call = stack.pop()
        took = self._clock() - call.began
        if call.range is not None:
            call.range.__exit__(None, None, None)
        key = (phase, "main" if thread == self._main else "backward")
        self._calls[key] += 1
        self._own[key] += took - call.inside
        if all(outer.phase != phase for outer in stack):
            self._whole[key] += took
        if stack:
            stack[-1].inside += took

    def per_step(self, steps: int) -> list[dict[str, Any]]:
        """Rows for JSON, times in milliseconds per step."""
        return [
            {
                "phase": key[0],
                "thread": key[1],
                "calls": calls / steps,
                "ms": self._whole[key] / 1e6 / steps,
                "own_ms": self._own[key] / 1e6 / steps,
            }
            for key, calls in sorted(self._calls.items())
        ]


@contextmanager
def watching(codes: Mapping[CodeType, str], times: PhaseTimes) -> Iterator[None]:
    """Report every call of ``codes``, which have the names of their phases, in the block.

    Raises BenchError if other tools hold all ids of ``sys.monitoring``.
    """
    monitoring = sys.monitoring
    tool = next((number for number in _TOOLS if monitoring.get_tool(number) is None), None)
    if tool is None:
        raise BenchError("all tools of sys.monitoring are taken: run without another profiler.")
    events = monitoring.events

    def begins(code: CodeType, _offset: int) -> Any:
        times.begins(codes[code])

    def ends(code: CodeType, _offset: int, _value: Any) -> Any:
        if code in codes:
            times.ends(codes[code])

    callbacks: dict[int, Callable[..., Any]] = {
        events.PY_START: begins,
        events.PY_RETURN: ends,
        events.PY_UNWIND: ends,
    }
    monitoring.use_tool_id(tool, _NAME)
    try:
        for event, callback in callbacks.items():
            monitoring.register_callback(tool, event, callback)
        for code in codes:
            monitoring.set_local_events(tool, code, events.PY_START | events.PY_RETURN)
        monitoring.set_events(tool, events.PY_UNWIND)
        yield
    finally:
        monitoring.set_events(tool, events.NO_EVENTS)
        for code in codes:
            monitoring.set_local_events(tool, code, events.NO_EVENTS)
        for event in callbacks:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
