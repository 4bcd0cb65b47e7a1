"""What guards and votes take of a step is told, on the rank where it is the most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_cg.tools.bench.results.host import overhead_lines
from megatron_cg.tools.bench.results.metrics import tables
from megatron_cg.tools.bench.runs.configurations import EAGER, GRAPHS

Make = Callable[..., dict[str, Any]]
COUNTERS = {
    **{"replayed": 40, "inputs_copied": 80, "inputs_in_place": 40, "mismatched": 1},
    **{"bytes_copied": 4000, "guard_ns": 4_000_000},
}
"""Of four steps: 1,000 us of guards a step."""
MS = {"guard: around a replay": 0.5, "votes": 0.25, "votes: wait": 0.125, "forward": 30.0}
PHASES = [
    {"phase": name, "thread": "main", "calls": 1.0, "ms": ms, "own_ms": 0.0}
    for name, ms in MS.items()
]


def rank(number: int = 0, **counters: int) -> dict[str, Any]:
    return {
        "rank": number,
        "captures": [],
        # The median is 105 ms.
        "timed": {"step_ms": [100.0, 90.0, 110.0, 500.0], "counters": COUNTERS | counters},
        "probed": {"phases": PHASES},
    }


def lines(result: Make, *ranks: dict[str, Any]) -> list[str]:
    (rows,) = tables([result(EAGER), result(GRAPHS, ranks=list(ranks))])
    return overhead_lines(rows)


def test_the_line_is_of_the_rank_with_the_highest_share(result: Make) -> None:
    assert lines(result, rank(0, guard_ns=400_000), rank(1)) == [
        "fsdp-graphs, guards and votes: 1.67% of a step, over the aim of 1%. Rank 0: guards 600 us "
        "a step, votes 250 us, of which 125 us wait for other ranks. Inputs of a replay: 2.0 "
        "copied, 1.0 read in place. Mismatches: 2.",
        "",
    ]
    assert "0.71% of a step, under the aim" in lines(result, rank(0, guard_ns=400))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"timed": None},
        {"probed": None},
        {"timed": {"step_ms": [1.0], "counters": None}},
        {"timed": {"step_ms": [1.0], "counters": COUNTERS | {"replayed": 0}}},
        {"timed": {"step_ms": [1.0], "counters": {"replayed": 4, "bytes_copied": 0}}},
    ],
    ids=["no steps", "not probed", "eager", "no replay", "no guards counted"],
)
def test_without_replays_nothing_is_told(result: Make, changes: dict[str, Any]) -> None:
    assert lines(result, rank() | changes) == []
