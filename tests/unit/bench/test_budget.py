"""A budget ends runs before they are begun, and rounds as a whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_cg.align.presets import load_preset
from megatron_cg.bench.budget import Budget
from megatron_cg.bench.commands import Settings
from megatron_cg.bench.contenders import DDP_GRAPHS, EAGER, GRAPHS
from megatron_cg.bench.schedule import PlannedRun, schedule
from megatron_cg.bench.windows import Windows

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
    budget = Budget(None, RUNS)
    assert budget.left() == math.inf
    assert [budget.refusal(run) for run in RUNS] == [""] * 6


def test_of_the_first_round_every_run_counts() -> None:
    clock = Clock()
    guess = FIRST[0].seconds()
    budget = Budget(guess + 1, RUNS, clock)
    assert budget.refusal(FIRST[0]) == ""
    clock.now = 2.0
    assert budget.refusal(FIRST[1]) == (
        f"{guess:.0f} s expected, {guess - 1:.0f} s left of --budget-seconds"
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (180.0, ""),
        (179.0, "round 2 is not begun: 90 s expected, 89 s left of --budget-seconds"),
    ],
)
def test_later_rounds_are_whole_or_are_not_begun(given: float, why: str) -> None:
    clock = Clock()
    budget = Budget(given, RUNS, clock)
    for run, seconds in zip(FIRST, (40.0, 20.0, 30.0), strict=True):
        budget.took(run, seconds)
        clock.now += seconds
    # Each of its runs alone would end in time.
    assert {budget.refusal(run) for run in SECOND} == {why}


def test_a_round_that_is_begun_may_still_lose_its_last_runs() -> None:
    clock = Clock()
    budget = Budget(100.0, RUNS, clock)
    for run in FIRST:
        budget.took(run, 30.0)
    assert budget.refusal(SECOND[0]) == ""
    clock.now = 75.0
    assert budget.refusal(SECOND[1]) == "30 s expected, 25 s left of --budget-seconds"


def test_runs_that_cannot_be_made_take_no_time() -> None:
    possible = [run for run in RUNS if run.contender != DDP_GRAPHS]
    budget = Budget(70.0, possible, Clock())
    for run in possible[:2]:
        budget.took(run, 30.0)
    assert budget.refusal(possible[2]) == ""


def test_other_runs_of_a_size_say_what_one_takes() -> None:
    budget = Budget(1e3, RUNS, Clock())
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
