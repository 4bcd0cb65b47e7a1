"""Runs follow one another, failures are shown and do not stop the others, budgets are kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.processes import Run
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.budget import Budget
from megatron_cg.tools.bench.runs.commands import Settings
from megatron_cg.tools.bench.runs.configurations import DDP_EAGER, EAGER, GRAPHS
from megatron_cg.tools.bench.runs.execute import (
    Options,
    Start,
    execute,
    shown_environment,
    shown_words,
)
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT, OK

SETTINGS = Settings(load_preset("llama"), 2)
RUNS = [PlannedRun(SETTINGS, name) for name in (EAGER, GRAPHS, DDP_EAGER)]
RANK = {"rank": 0, "finished": True, "captures": []}


def writing(rank: dict[str, Any], also: str = "") -> str:
    """A program that leaves a rank's metrics where a run would."""
    text = json.dumps(rank)
    return (
        f"import os; os.mkdir('metrics'); open('metrics/rank0.json', 'w').write({text!r}); {also}"
    )


def starting(programs: dict[str, str]) -> Start:
    """Runs the program of each configuration in its own folder."""

    def start(run: PlannedRun, folder: Path) -> Run:
        body = f"import os; os.chdir({str(folder)!r})\n{programs[run.configuration]}"
        return Run(run.name, [sys.executable, "-c", body], dict(os.environ), folder)

    return start


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Options]:
    """Options of an invocation in a folder of its own."""

    def make(**changes: Any) -> Options:
        given = {"work": tmp_path, "invocation": "one", "timeout": 600.0, **changes}
        return Options(**given)

    return make


def test_a_configuration_that_fails_is_shown_and_the_others_go_on(
    options: Callable[..., Options],
) -> None:
    programs = {
        EAGER: writing(RANK),
        GRAPHS: "print('before', flush=True); raise RuntimeError('out of luck')",
        DDP_EAGER: "pass",
    }
    seen: list[str] = []
    results = execute(
        RUNS,
        starting(programs),
        options(),
        {"notice": ""},
        finished=lambda r: seen.append(r["status"]),
    )
    assert seen == [OK, FAILED, FAILED]
    assert [result["error"] for result in results] == [
        "",
        "RuntimeError: out of luck",
        "no metrics were written",
    ]
    assert results[1]["tail"][0] == "before"
    assert results[0]["ranks"] == [RANK] and results[0]["key"] == RUNS[0].key
    assert results[0]["baseline"] == EAGER


def test_a_run_that_did_not_finish_failed_and_keeps_its_metrics(
    options: Callable[..., Options],
) -> None:
    begun = RANK | {"finished": False, "timed": {"step_ms": [1.0]}}
    programs = {EAGER: writing(begun), GRAPHS: writing(RANK, "raise SystemExit(3)")}
    results = execute(RUNS[:2], starting(programs), options(), {}, finished=lambda _r: None)
    assert [result["status"] for result in results] == [FAILED, FAILED]
    assert results[0]["ranks"] == [begun] and results[1]["error"] == "exit code 3"


def test_what_can_no_longer_end_in_time_is_left_out(options: Callable[..., Options]) -> None:
    results = execute(RUNS, starting({}), options(budget=5.0), {}, finished=lambda _r: None)
    assert [result["status"] for result in results] == [LEFT_OUT] * 3
    assert "s left of --budget-seconds" in results[0]["error"]


def test_runs_of_later_rounds_that_can_no_longer_end_are_not_begun(
    options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = [replace(run, round=2) for run in reversed(RUNS)]
    last = [replace(run, round=3) for run in RUNS]
    programs = {name: writing(RANK) for name in (EAGER, GRAPHS, DDP_EAGER)}
    ended: list[dict[str, Any]] = []

    def finished(result: dict[str, Any]) -> None:
        ended.append(result)
        if len(ended) == 6:
            monkeypatch.setattr(Budget, "left", lambda _self: 0.0)

    runs, limits = [*RUNS, *again, *last], options(budget=1e6)
    results = execute(runs, starting(programs), limits, {}, finished=finished)
    assert [result["status"] for result in results] == [OK] * 6 + [LEFT_OUT] * 3
    assert [result["key"]["round"] for result in results] == [1] * 3 + [2] * 3 + [3] * 3
    # The text also has an estimate, which depends on the runs before.
    assert all("0 s left of --budget-seconds" in result["error"] for result in results[6:])
    assert len({path.name for path in limits.work.iterdir() if path.is_dir()}) == 6


def test_a_run_gets_no_more_time_than_is_left(options: Callable[..., Options]) -> None:
    programs = {EAGER: "import time; time.sleep(600)"}
    quick = options(timeout=0.5)
    (result,) = execute(RUNS[:1], starting(programs), quick, {}, finished=lambda _r: None)
    assert result["status"] == FAILED
    assert result["error"] == "did not end within --timeout 0.5 s"


def test_a_run_that_measured_all_and_hangs_is_stopped(
    options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_cg.tools.bench.runs.execute.GRACE", 0.1)
    single = [PlannedRun(replace(SETTINGS, nproc=1), EAGER)]
    programs = {EAGER: writing(RANK, "import time; time.sleep(600)")}
    (result,) = execute(single, starting(programs), options(), {}, finished=lambda _r: None)
    assert result["status"] == OK and result["ranks"] == [RANK]


def test_what_a_machine_cannot_run_is_left_out_with_the_reason(
    options: Callable[..., Options],
) -> None:
    programs = {EAGER: writing(RANK), DDP_EAGER: writing(RANK)}
    results = execute(
        RUNS,
        starting(programs),
        options(),
        {},
        finished=lambda _r: None,
        refused=lambda run: "no kernels" if run.configuration == GRAPHS else "",
    )
    assert [result["status"] for result in results] == [OK, LEFT_OUT, OK]
    assert results[1]["error"] == "no kernels"


def test_a_trace_and_samples_become_metrics_and_the_trace_goes(
    options: Callable[..., Options], tmp_path: Path
) -> None:
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
    kept = options(keep_traces=True, samples=tmp_path / "kept")
    (result,) = execute(
        RUNS[:1], starting({EAGER: writing(rank, also)}), kept, {}, finished=lambda _r: None
    )
    assert result["trace"]["busy_ms"] == pytest.approx(1.0)
    assert result["device_trace"]["busy_ms"] == pytest.approx(3.0)
    assert "idle_by_launch" in result["trace"] and "idle_by_launch" not in result["device_trace"]
    profile = f"{RUNS[0].name}.one.speedscope.json"
    assert result["notes"] == [
        "samples: py-spy fell behind",
        "a sampling profile of 2 steps of 10.0 ms, 7 samples lost is in "
        f"kept/{profile}: open it in https://www.speedscope.app",
    ]
    folder = tmp_path / f"{RUNS[0].name}.one" / "metrics"
    for name in ("trace.json", "device_trace.json"):
        assert not (folder / name).exists() and (folder / f"{name}.gz").exists()
    assert (tmp_path / "kept" / profile).read_text() == "{}"


def test_a_trace_that_shows_nothing_is_noted(options: Callable[..., Options]) -> None:
    names = {"traced": "device_trace", "profiled": "trace"}
    rank = RANK | {kind: {"steps": 2, "trace": f"{name}.json"} for kind, name in names.items()}
    (result,) = execute(
        RUNS[:1], starting({EAGER: writing(rank)}), options(), {}, finished=lambda _r: None
    )
    assert result["status"] == OK and result["trace"] is None and result["device_trace"] is None
    for note, name in zip(result["notes"], names.values(), strict=True):
        assert f"/{name}.json is not a trace" in note


def test_what_is_kept_of_a_command_names_no_folder() -> None:
    assert shown_words(["/usr/bin/python", "-m", "x", "/home/a/text"]) == [
        *("python", "-m", "x", "text")
    ]
    env = {"NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "/tmp/x", "HOME": "/root", "CUDA_A": "1"}
    assert shown_environment(env) == {"CUDA_A": "1", "NCCL_ALGO": "Ring"}
