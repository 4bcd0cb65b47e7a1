"""Phases are found in the real packages and timed without being replaced."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.trace_phases import PHASES, find_code, find_phases
from megatron_cg.tools.bench.measure.watching import PhaseTimes, watching


def outer() -> None:
    inner()
    with pytest.raises(ValueError):
        fails()


def inner() -> None:
    pass


def fails() -> None:
    raise ValueError


CODES = {outer.__code__: "outer", inner.__code__: "inner", fails.__code__: "inner"}


def ticks() -> Iterator[int]:
    """A clock that goes on by a million nanoseconds at every look."""
    return (tick * 1_000_000 for tick in count())


def test_every_phase_is_in_the_installed_packages() -> None:
    for path in (path for paths in PHASES.values() for path in paths):
        importlib.import_module(path.partition(":")[0])
    codes, missing = find_phases()
    assert missing == []
    assert set(codes.values()) == set(PHASES)


def test_functions_that_are_not_there_are_named() -> None:
    paths = (
        "json:dumps",
        "json:nothing",
        "no.such.module:name",
        "json:dumps.<locals>.nested",
        "json:codecs",
    )
    codes, missing = find_phases({"phase": paths})
    assert list(codes.values()) == ["phase"] and missing == list(paths[1:])


def test_nested_functions_are_found_below_decorated_ones() -> None:
    code = find_code("megatron_cg.upstream.patch:put_over.<locals>.undo")
    assert code is not None and code.co_qualname == "put_over.<locals>.undo"
    decorated = find_code("megatron_cg.upstream.patch:garbage_collection_kept")
    assert decorated is not None and decorated.co_name == "garbage_collection_kept"


def test_phases_are_counted_with_and_without_what_is_inside() -> None:
    times = PhaseTimes(clock=ticks().__next__)
    with watching(CODES, times):
        outer()
    rows = {row["phase"]: row for row in times.per_step(1)}
    # outer 0, inner 1 to 2, fails 3 to 4, outer ends at 5; an exception ends a phase as well.
    assert rows["outer"] == {
        "phase": "outer",
        "thread": "main",
        "calls": 1,
        "ms": 5.0,
        "own_ms": 3.0,
    }
    assert (rows["inner"]["calls"], rows["inner"]["ms"], rows["inner"]["own_ms"]) == (2, 2.0, 2.0)
    assert times.per_step(2)[0]["ms"] == rows["inner"]["ms"] / 2


def test_a_phase_inside_itself_counts_its_time_once() -> None:
    times = PhaseTimes(clock=ticks().__next__)
    with watching({outer.__code__: "same", inner.__code__: "same"}, times):
        outer()
    (row,) = times.per_step(1)
    assert (row["calls"], row["ms"], row["own_ms"]) == (2, 3.0, 3.0)


def test_other_threads_are_told_apart() -> None:
    times = PhaseTimes()
    with watching({inner.__code__: "inner"}, times):
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        inner()
    assert [(row["thread"], row["calls"]) for row in times.per_step(1)] == [
        ("backward", 1),
        ("main", 1),
    ]


def test_nothing_is_seen_or_left_after_the_block() -> None:
    before = [sys.monitoring.get_tool(tool) for tool in range(6)]
    times = PhaseTimes()
    with pytest.raises(ZeroDivisionError), watching(CODES, times):
        assert [sys.monitoring.get_tool(tool) for tool in range(6)] != before
        raise ZeroDivisionError
    outer()
    assert times.per_step(1) == []
    assert [sys.monitoring.get_tool(tool) for tool in range(6)] == before


def test_other_tools_are_not_pushed_aside() -> None:
    for tool in (2, 3, 4):
        sys.monitoring.use_tool_id(tool, "other")
    try:
        with (
            pytest.raises(BenchError, match="without another profiler"),
            watching({}, PhaseTimes()),
        ):
            pass
    finally:
        for tool in (2, 3, 4):
            sys.monitoring.free_tool_id(tool)
