"""Runs follow one another, failures are shown and do not stop the others, budgets are kept."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.processes import Run
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun, schedule
from megatron_cg.tools.bench.runs.budget import Budget
from megatron_cg.tools.bench.runs.commands import Settings
from megatron_cg.tools.bench.runs.configurations import DDP_EAGER, EAGER, GRAPHS
from megatron_cg.tools.bench.runs.execute import (
    Options,
    execute,
    shown_environment,
    shown_words,
)
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT, OK

SETTINGS = Settings(load_preset("llama"), 1, windows=Windows(probed=0, profiled=0))
RUNS = schedule([SETTINGS], "default", [EAGER, GRAPHS, DDP_EAGER], None, rounds=3)
FIRST, SECOND = RUNS[:3], RUNS[3:6]
RANK = {"rank": 0, "finished": True, "captures": []}
Made = Callable[..., list[dict[str, Any]]]


def writing(rank: dict[str, Any], also: str = "") -> str:
    """A program that leaves a rank's metrics where a run would."""
    text = json.dumps(rank)
    return (
        f"import os; os.mkdir('metrics'); open('metrics/rank0.json', 'w').write({text!r}); {also}"
    )


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Runs the program of each configuration in its own folder; returns the results."""

    def make(
        programs: dict[str, str],
        runs: list[PlannedRun] = FIRST,
        refused: Callable[[PlannedRun], str] = lambda _run: "",
        **options: Any,
    ) -> list[dict[str, Any]]:
        def start(run: PlannedRun, folder: Path) -> Run:
            body = f"import os; os.chdir({str(folder)!r})\n{programs[run.configuration]}"
            return Run(run.name, [sys.executable, "-c", body], dict(os.environ), folder)

        given = Options(**{"work": tmp_path, "invocation": "one", "timeout": 600.0, **options})
        return list(execute(runs, start, given, {"notice": ""}, refused))

    return make


def test_runs_that_fail_are_shown_keep_their_metrics_and_the_others_go_on(made: Made) -> None:
    begun = RANK | {"finished": False, "timed": {"step_ms": [1.0]}}
    programs = {
        EAGER: writing(RANK),
        GRAPHS: "print('before', flush=True); raise RuntimeError('out of luck')",
        DDP_EAGER: writing(begun),
    }
    again = {EAGER: "pass", GRAPHS: writing(RANK), DDP_EAGER: writing(RANK, "raise SystemExit(3)")}
    cannot = "no kernels"
    results = made(programs)
    results += made(again, SECOND, lambda run: cannot if run.configuration == GRAPHS else "")
    assert [(result["status"], result["error"]) for result in results] == [
        (OK, ""),
        (FAILED, "RuntimeError: out of luck"),
        (FAILED, "no metrics were written"),
        (FAILED, "exit code 3"),
        (LEFT_OUT, cannot),
        (FAILED, "no metrics were written"),
    ]
    assert results[0]["ranks"] == [RANK] and results[0]["key"] == FIRST[0].key
    assert results[0]["baseline"] == EAGER and results[0]["notice"] == ""
    assert results[1]["tail"][0] == "before" and results[2]["ranks"] == [begun]


def test_runs_that_can_no_longer_end_are_not_begun(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path.glob
    monkeypatch.setattr(
        Budget, "left", lambda _self: 1e6 if len([*ended("*/metrics/*.json")]) < 4 else 0.0
    )
    programs = {name: writing(RANK) for name in (EAGER, GRAPHS, DDP_EAGER)}
    results = made(programs, RUNS[:6], budget=1e6)
    assert [result["status"] for result in results] == [OK] * 4 + [LEFT_OUT] * 2
    assert [result["key"]["round"] for result in results] == [1] * 3 + [2] * 3
    # The text also has an estimate, which depends on the runs before.
    assert all("0 s left of --budget-seconds" in result["error"] for result in results[4:])
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 4


def test_a_run_gets_no_more_time_than_is_left(made: Made) -> None:
    (result,) = made({EAGER: "import time; time.sleep(600)"}, FIRST[:1], timeout=0.5)
    assert result["status"] == FAILED
    assert result["error"] == "did not end within --timeout 0.5 s"


def test_a_run_that_measured_all_and_hangs_is_stopped(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_cg.tools.bench.runs.execute.GRACE", 0.1)
    (result,) = made({EAGER: writing(RANK, "import time; time.sleep(600)")}, FIRST[:1])
    assert result["status"] == OK and result["ranks"] == [RANK]


def test_a_trace_and_samples_become_metrics_and_the_trace_goes(made: Made, tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 0, "dur": 2000}
    rank = RANK | {
        "traced": {"steps": 1, "trace": "device_trace.json"},
        "profiled": {"steps": 2, "trace": "trace.json"},
        "sampled": {
            **{"steps": 2, "step_ms": 10.0, "native": False, "lost": 7},
            **{"file": "samples.speedscope.json", "note": "py-spy fell behind"},
        },
    }
    text = json.dumps({"traceEvents": [kernel]})
    also = f"open('metrics/trace.json', 'w').write({text!r});"
    also += f"open('metrics/device_trace.json', 'w').write({text.replace('2000', '3000')!r});"
    also += "open('metrics/samples.speedscope.json', 'w').write('{}')"
    programs = {EAGER: writing(rank, also), GRAPHS: writing(rank)}
    samples = tmp_path / "kept"
    result, without = made(programs, FIRST[:2], keep_traces=True, samples=samples)
    assert result["trace"]["busy_ms"] == pytest.approx(1.0)
    assert result["device_trace"]["busy_ms"] == pytest.approx(3.0)
    assert "idle_by_launch" in result["trace"] and "idle_by_launch" not in result["device_trace"]
    profile = f"{FIRST[0].name}.one.speedscope.json"
    assert result["notes"] == [
        "samples: py-spy fell behind",
        "a sampling profile of 2 steps of 10.0 ms, 7 samples lost is in "
        f"kept/{profile}: open it in https://www.speedscope.app",
    ]
    folder = tmp_path / f"{FIRST[0].name}.one" / "metrics"
    for name in ("trace.json", "device_trace.json"):
        assert not (folder / name).exists() and (folder / f"{name}.gz").exists()
    assert (samples / profile).read_text() == "{}"
    # Traces that are not there are noted.
    assert without["status"] == OK and without["trace"] is without["device_trace"] is None
    for note, name in zip(without["notes"], ("device_trace", "trace"), strict=False):
        assert f"/{name}.json is not a trace" in note


def test_what_is_kept_of_a_command_names_no_folder() -> None:
    assert shown_words(["/usr/bin/python", "-m", "x", "/home/a/text"]) == [
        *("python", "-m", "x", "text")
    ]
    env = {"NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "/tmp/x", "HOME": "/root", "CUDA_A": "1"}
    assert shown_environment(env) == {"CUDA_A": "1", "NCCL_ALGO": "Ring"}


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_would_end_too_late_is_refused_and_a_shorter_run_may_follow() -> None:
    assert Budget(None).left() == math.inf and Budget(None).refusal(RUNS[0]) == ""
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
