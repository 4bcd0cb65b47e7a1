"""Phases are found in the real packages and timed without being replaced; stacks are sampled."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from megatron_cg.bench import sampling
from megatron_cg.bench.phases import PHASES, find_code, find_phases
from megatron_cg.bench.sampling import ThreadSampler
from megatron_cg.bench.stacks import ALL, most_inclusive
from megatron_cg.bench.watching import PhaseTimes, WatchError, watching


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
    found = find_phases()
    assert found.missing == []
    assert set(found.codes.values()) == set(PHASES)


def test_functions_that_are_not_there_are_named() -> None:
    paths = (
        "json:dumps",
        "json:nothing",
        "no.such.module:name",
        "json:dumps/nested",
        "json:codecs",
    )
    found = find_phases({"phase": paths})
    assert list(found.codes.values()) == ["phase"]
    assert found.missing == list(paths[1:])


def test_nested_functions_are_found_below_decorated_ones() -> None:
    code = find_code("megatron_cg.undo:set_attribute/undo")
    assert code is not None and code.co_qualname == "set_attribute.<locals>.undo"
    decorated = find_code("megatron_cg.undo:garbage_collection_kept")
    assert decorated is not None and decorated.co_name == "garbage_collection_kept"


def test_phases_are_counted_with_and_without_what_is_inside() -> None:
    times = PhaseTimes(ticks().__next__)
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
    times = PhaseTimes(ticks().__next__)
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
    assert times.times == {}
    assert [sys.monitoring.get_tool(tool) for tool in range(6)] == before


def test_other_tools_are_not_pushed_aside() -> None:
    for tool in (2, 3, 4):
        sys.monitoring.use_tool_id(tool, "other")
    try:
        with (
            pytest.raises(WatchError, match="without another profiler"),
            watching({}, PhaseTimes()),
        ):
            pass
    finally:
        for tool in (2, 3, 4):
            sys.monitoring.free_tool_id(tool)


def test_folded_stacks_become_shares_by_thread() -> None:
    lines = [
        "thread (0x1): main;run (a.py:1);step (a.py:5) 6",
        "thread (0x1): main;run (a.py:1);step (a.py:9);step (a.py:9);copy (b.c) 2",
        "process 5;thread (0x2): pt_autograd;Thread.run (t.py:9);run (a.py:1) 1",
        "cut off",
        "",
    ]
    rows = most_inclusive(lines)
    first = [(row["function"], row["share"], row["own"]) for row in rows[:3]]
    assert first == [
        ("run (a.py)", 1.0, 0.0),
        ("step (a.py)", 1.0, 0.75),
        ("copy (b.c)", 0.25, 0.25),
    ]
    other = {row["function"] for row in rows if row["thread"] == "thread (0x2): pt_autograd"}
    assert other == {"Thread.run (t.py)", "run (a.py)"}
    assert most_inclusive(["a;b 1"])[0]["thread"] == ALL
    assert len(most_inclusive(lines, top=1)) == 2


def test_a_thread_samples_where_py_spy_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    sampler = sampling.sampling(tmp_path / "new" / "samples.folded")
    assert isinstance(sampler, ThreadSampler)
    while not sampler._stacks:
        time.sleep(0.001)
    facts = sampler.stop()
    assert facts["sampler"] == "thread" and "not installed" in facts["note"]
    rows = most_inclusive((tmp_path / "new" / facts["file"]).read_text().splitlines())
    functions = [row["function"] for row in rows if row["thread"] == "thread MainThread"]
    name = "test_a_thread_samples_where_py_spy_is_not (test_host.py)"
    assert name in functions


REFUSES = "import sys; sys.exit('permission denied')"
SAMPLES = """
import pathlib, signal, sys
def write(*_):
    pathlib.Path(sys.argv[-1]).write_text("thread 1;f 3\\n")
    sys.exit(0)
# Also where this signal was ignored at the start, as in a shell's background job.
signal.signal(signal.SIGINT, write)
print("Sampling process", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_py_spy_is_asked_first(
    fails_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of that name stands in for py-spy, which is never a dependency."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable}\n" + (REFUSES if fails_at_once else SAMPLES))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = sampling.sampling(tmp_path / "samples.folded").stop()
    if fails_at_once:
        assert facts["sampler"] == "thread" and "permission denied" in facts["note"]
    else:
        assert facts == {"sampler": "py-spy", "file": "samples.folded", "note": ""}
        assert (tmp_path / "samples.folded").read_text() == "thread 1;f 3\n"
