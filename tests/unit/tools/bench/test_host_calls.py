"""Folded stacks become milliseconds a step, as a tree that is short and adds up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.bench.call_tree import Row, call_tree, rows
from megatron_cg.tools.bench.host_calls import BACKWARD, MAIN, host_calls
from megatron_cg.tools.bench.host_calls_text import sampled_block, sampled_heading
from megatron_cg.tools.bench.stacks import ALL, Frame, by_function, read_stacks

REAL = Path(__file__).with_name("samples.folded")
"""A part of what py-spy wrote of 25 steps of a qwen3-moe with graphs, 200 times a second."""
STACKS = [
    "thread (0x1): MainThread;run (a.py:1);step (a.py:5) 6",
    "thread (0x1): MainThread;run (a.py:1);step (a.py:9);step (a.py:9);copy(int, a) (b.c) 2",
    "process 5;thread (0x2): pool;Thread.run (t.py:9);run (/home/me/a.py:1) 1",
    "cut off",
    "",
]


def facts(steps: int = 1, step_ms: float = 50.0, lost: int = 0) -> dict[str, Any]:
    """Of a window with a look at every 5 ms."""
    given = {"steps": steps, "step_ms": step_ms, "lost": lost}
    return given | {"sampler": "py-spy", "interval_ms": 5.0}


def found(lines: Sequence[str], **changes: Any) -> dict[str, Any]:
    calls = host_calls(lines, facts(**changes))
    assert calls is not None
    return calls


def tree(counts: dict[str, int], least: float) -> list[tuple[Any, ...]]:
    """The rows of stacks such as ``a b c``; each call of a row by its name."""
    stacks = {tuple(Frame(name, 1) for name in text.split()): n for text, n in counts.items()}

    def shown(row: Row) -> tuple[Any, ...]:
        return row.depth, " ".join(call.function for call in row.calls), row.count, row.own, row.cut

    return [shown(row) for row in rows(call_tree(stacks), least)]


def test_lines_become_stacks_without_folders_of_the_machine() -> None:
    stacks = read_stacks(STACKS)
    main, pool = stacks.values()
    assert list(stacks) == ["thread (0x1): MainThread", "thread (0x2): pool"]
    assert main[Frame("run (a.py)", 1), Frame("step (a.py)", 5)] == 6
    assert main.total() == 8
    assert list(pool) == [(Frame("Thread.run (t.py)", 9), Frame("run (a.py)", 1))]
    assert by_function(main) == [
        ("step (a.py)", 8, 6),
        ("copy(int, a) (b.c)", 2, 2),
        ("run (a.py)", 8, 0),
    ]
    assert list(read_stacks(["a;b 1"])) == [ALL]
    # A thread without any Python frame.
    assert read_stacks(["thread (7): x 3"])["thread (7): x"] == {(): 3}


def test_what_only_passes_on_is_one_line() -> None:
    assert tree({"a b c d": 6, "a b c e": 4}, 1) == [
        (0, "a b c", 10, 0, 0),
        (1, "d", 6, 6, 0),
        (1, "e", 4, 4, 0),
    ]
    # What b does itself is worth a line of its own.
    assert tree({"a b": 3, "a b c": 7}, 2) == [(0, "a b", 10, 3, 0), (1, "c", 7, 7, 0)]


def test_small_calls_are_left_out_and_counted() -> None:
    assert tree({"a b": 8, "a c": 1, "a d": 1, "a": 2}, 2) == [
        (0, "a", 12, 2, 2),
        (1, "b", 8, 8, 0),
    ]
    # Many that take a little each do not add up unseen on one line.
    assert tree({"a": 1, "a b": 1, "a b c": 1, "a b c d": 7}, 2) == [
        (0, "a b", 10, 2, 0),
        (1, "c d", 8, 8, 0),
    ]


def test_a_function_that_calls_itself_is_counted_once_a_stack() -> None:
    assert tree({"a a a": 5, "a": 5}, 1) == [(0, "a", 10, 5, 0), (1, "a a", 5, 5, 0)]
    (thread,) = found(["thread 1: MainThread;f (a.py:1);f (a.py:2) 10"])["threads"]
    assert thread["functions"] == [{"function": "f (a.py)", "ms": 50.0, "own_ms": 50.0}]


def test_a_row_is_its_own_its_children_and_what_it_cut() -> None:
    thread = found(REAL.read_text().splitlines(), steps=25, step_ms=160.0, lost=40)["threads"][0]
    listed = thread["tree"]
    for index, row in enumerate(listed):
        children = 0.0
        for below in listed[index + 1 :]:
            if below["depth"] <= row["depth"]:
                break
            children += below["ms"] if below["depth"] == row["depth"] + 1 else 0.0
        assert row["ms"] == pytest.approx(row["own_ms"] + children + row["cut_ms"], abs=0.01)


def test_lost_looks_are_scaled_for() -> None:
    line = ["thread 1: MainThread;f (a.py:1) 6"]
    (whole,) = found(line)["threads"]
    (scaled,) = found(line, lost=2)["threads"]
    assert (whole["ms"], scaled["ms"]) == (30.0, 37.5)
    # A thread is seen once a look: where more stacks came than looks were left, they were all.
    (most,) = found(line, lost=9)["threads"]
    assert most["ms"] == 50.0
    assert found(line, steps=2, step_ms=25.0)["threads"][0]["ms"] == 15.0


def test_threads_have_the_names_of_what_they_do() -> None:
    lines = [
        "thread (1);_run_module_as_main (<frozen runpy>:1);f (a.py:1) 5",
        "thread (2): Dummy-2;BackwardCFunction.apply (torch/autograd/function.py:3) 2",
        "thread (2): Dummy-2 1",
        "thread (3): QueueFeederThread;Thread.run (threading.py:1) 1",
    ]
    calls = found(lines)
    assert [thread["thread"] for thread in calls["threads"]] == [MAIN, BACKWARD]
    assert calls["threads"][1]["no_frame_ms"] == 5.0
    assert calls["other_threads"] == [{"thread": "thread (3): QueueFeederThread", "ms": 5.0}]
    assert found(["f (a.py:1) 1"])["threads"][0]["thread"] == ALL
    assert host_calls(["cut off"], facts()) is None


def test_a_real_profile_shows_where_the_host_is() -> None:
    lines = REAL.read_text().splitlines()
    calls = found(lines, steps=25, step_ms=160.0, lost=40)
    json.dumps(calls)
    main, backward = calls["threads"]
    # 800 looks less 40.
    assert calls["stack_ms"] == pytest.approx(160 / 760)
    rows_of = {row["function"].partition(" ")[0]: row for row in backward["tree"]}
    gemm = rows_of["general_grouped_gemm"]
    assert gemm["own_ms"] == pytest.approx(gemm["ms"], abs=0.01) and gemm["ms"] > 20
    assert "pretrain (training/training.py)" in main["tree"][0]["through"]


def test_the_block_is_as_wide_as_a_screen_and_names_callers() -> None:
    calls = found(REAL.read_text().splitlines(), steps=25, step_ms=160.0, lost=40)
    lines = sampled_block(calls)
    assert all(len(line) < 140 for line in lines)
    assert "main: " in lines[0] and lines[2] == "      ms     own"
    text = "\n".join(lines)
    assert ".. > train > " in text and "runpy" not in text and "<locals>" not in text
    assert "backward: " in text and "  no Python frame" in text
    assert "most of their own, wherever called:" in text
    assert sampled_heading(calls) == (
        "host time a step, sampled (py-spy: 25 steps of 160.0 ms, "
        f"{calls['stacks']:,} stacks; 40 of 800 looks were lost and are scaled for)"
    )
    assert "lost" not in sampled_heading(found(["f (a.py:1) 1"]))


def test_names_are_short_and_lines_are_told_where_there_is_one() -> None:
    name = "A.f.<locals>.g.<locals>.<lambda> (core/a.py:7)"
    lines = [f"thread 1: MainThread;{name};at::copy(int) (libtorch.so) 5", f"thread 1;{name} 5"]
    text = sampled_block(found(lines))
    assert f"{25:8.1f}{25:8.1f}  g.<lambda> > at::copy(int) (libtorch.so)" in text
    assert "thread 1: 25.0 ms a step" in text
    one = sampled_block(found(["thread 1: MainThread;f (core/a.py:7) 5"]))
    assert f"{25:8.1f}{25:8.1f}  f (a.py:7)" in one
