"""A budget ends runs before they are begun."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun, schedule
from megatron_cg.tools.bench.runs.budget import Budget
from megatron_cg.tools.bench.runs.commands import Settings
from megatron_cg.tools.bench.runs.configurations import DDP_GRAPHS, EAGER, GRAPHS

# All rounds alike, so that a run's guess is the same in each.
WINDOWS = Windows(probed=0, profiled=0)
SETTINGS = Settings(load_preset("llama"), 2, windows=WINDOWS)
RUNS = schedule([SETTINGS], "default", [EAGER, GRAPHS, DDP_GRAPHS], None, rounds=2)
FIRST, SECOND = RUNS[:3], RUNS[3:]


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_budget_nothing_is_refused() -> None:
    budget = Budget(None)
    assert budget.left() == math.inf
    assert [budget.refusal(run) for run in RUNS] == [""] * 6


def test_what_would_end_too_late_is_refused() -> None:
    clock = Clock()
    guess = FIRST[0].seconds()
    budget = Budget(guess + 1, clock)
    assert budget.refusal(FIRST[0]) == ""
    clock.now = 2.0
    assert budget.refusal(FIRST[1]) == (
        f"{guess:.0f} s expected, {guess - 1:.0f} s left of --budget-seconds"
    )


def test_part_of_a_round_is_begun_and_a_shorter_run_may_follow_one_refused() -> None:
    clock = Clock()
    budget = Budget(150.0, clock)
    for run, seconds in zip(FIRST, (40.0, 20.0, 30.0), strict=True):
        budget.took(run, seconds)
        clock.now += seconds
    # 60 s are left of 90 that the round would take.
    assert [budget.refusal(run) for run in SECOND] == ["", "", ""]
    clock.now = 125.0
    assert [budget.refusal(run) for run in SECOND] == [
        "30 s expected, 25 s left of --budget-seconds",
        "",
        "40 s expected, 25 s left of --budget-seconds",
    ]


def test_other_runs_of_a_size_say_what_one_takes() -> None:
    budget = Budget(1e3, Clock())
    guess = FIRST[0].seconds()
    assert budget.expected(FIRST[0]) == guess
    budget.took(FIRST[0], 2 * guess)
    assert budget.expected(FIRST[1]) == 2 * guess
    budget.took(FIRST[1], 3 * guess)
    assert (budget.expected(SECOND[2]), budget.expected(SECOND[1])) == (2 * guess, 3 * guess)
    larger = PlannedRun(replace(SETTINGS, layers=16), EAGER)
    assert budget.expected(larger) == larger.seconds()
    # A round that is only timed is shorter than one that was traced too.
    traced = PlannedRun(replace(SETTINGS, windows=Windows()), EAGER)
    budget.took(traced, 2 * traced.seconds())
    assert budget.expected(SECOND[2]) == 2 * guess < 2 * traced.seconds()
