"""The command from end to end: on the tape for real, on GPUs as far as its commands."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.bench import INCOMPLETE
from megatron_cg.tools.bench.measure.windows import given
from megatron_cg.tools.bench.results.metrics import tables
from megatron_cg.tools.bench.runs.configurations import CONFIGURATIONS, EAGER, GRAPHS
from megatron_cg.tools.cli.main import USAGE_ERROR, main

TAPE = "--backend tape --shapes llama-tiny --nproc 1 --timed-steps 2 --settle-steps 1"


def bench(words: str, out: Path) -> int:
    before, separator, extra = words.partition(" -- ")
    return main(["bench", *before.split(), "--out", str(out), *separator.split(), *extra.split()])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two configurations in two rounds leave in --out."""
    out = tmp_path_factory.mktemp("made")
    assert bench(f"{TAPE} --warmup-steps 1 --probe-steps 1 --rounds 2", out) == 0
    return out


def runs_in(out: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((out / "bench.json").read_text())["runs"]
    return runs


def test_the_tape_runs_from_end_to_end(made: Path) -> None:
    runs = runs_in(made)
    eager, graphs = runs[:2]
    assert len({run["invocation"] for run in runs}) == 1
    for run in runs:
        (rank,) = run["ranks"]
        assert rank["finished"] and len(rank["timed"]["step_ms"]) == 2
        assert run["machine"]["processors"] and rank["versions"]["megatron-core"]
    assert eager["ranks"][0]["captures"] == []
    (capture,) = graphs["ranks"][0]["captures"]
    assert capture["after_step"] == 1 and capture["seconds"] > 0
    assert graphs["ranks"][0]["timed"]["counters"]["replayed"] == 2 * 3
    # The tape is as exact as the graphs that it stands for.
    assert len({run["ranks"][0]["timed"]["loss"] for run in runs}) == 1
    phases = {row["phase"] for row in graphs["ranks"][0]["probed"]["phases"]}
    assert {"unshard", "reshard", "gradient bucketing", "gradient reduce", "replay"} <= phases
    assert {"guard", "guard: around a replay", "votes", "votes: post", "votes: wait"} <= phases
    assert {"exchange of parameters", "main gradients", "main weights"} <= phases
    report = (made / "bench.md").read_text()
    assert "fsdp-graphs, guards and votes: " in report
    assert "CPU tape" in report and "Scopes: attn." in report


def test_rounds_are_made_in_turn_and_joined(made: Path) -> None:
    runs = runs_in(made)
    # They are kept in the order in which they began.
    order = [(run["key"]["round"], run["key"]["contender"]) for run in runs]
    assert order == [(1, EAGER), (1, GRAPHS), (2, GRAPHS), (2, EAGER)]
    assert ["probed" in run["ranks"][0] for run in runs] == [True, True, False, False]
    assert len(list((made / "runs").glob("*.json"))) == 4
    ((eager, graphs),) = tables(runs)
    assert [len(row.metrics.steps) for row in (eager, graphs)] == [4, 4]
    pairs = zip(graphs.metrics.medians, eager.metrics.medians, strict=True)
    each = [mine / its for mine, its in pairs]
    found = graphs.step_ratio(eager)
    assert found and (found.least, found.most, found.rounds) == (min(each), max(each), 2)
    report = (made / "bench.md").read_text()
    assert f" {found.median:.3f} ({found.least:.3f} to {found.most:.3f}) |" in report
    assert f"| {', '.join(f'{median:,.1f}' for median in graphs.metrics.medians)} |" in report


def test_results_are_reported_and_compared_again(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs")
    assert bench(f"--report --compare {made / 'bench.json'}", tmp_path) == 0
    report = (tmp_path / "bench.md").read_text()
    assert "| 1.000 |" in report.partition("## Compared")[2] and "old / new" in report
    # To a file or a pipe the tables go as they are in the report, not drawn as for a screen.
    printed, _, files = capsys.readouterr().out.partition("written: ")
    assert printed.strip() == report.strip()
    assert f"{tmp_path / 'bench.json'} and {tmp_path / 'bench.md'}\n" in files
    drawn = files.partition("drawn: ")[2].splitlines()[0].split(", ")
    assert sorted(drawn) == sorted(map(str, tmp_path.glob("*.png")))
    assert {name.split(".")[-2] for name in drawn} == {"step", "host"}
    # The last lines are short.
    title, heads, *rows, notice = files[files.index("llama-tiny: ") :].splitlines()
    assert title.startswith("llama-tiny: 3 layers") and heads.split()[:2] == [
        "configuration",
        "step,",
    ]
    assert [row.split()[0] for row in rows] == [EAGER, GRAPHS]
    assert rows[0].endswith("the baseline") and "nothing about a GPU" in notice


def test_without_matplotlib_it_says_what_to_install(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert bench("--report", tmp_path) == 0
    printed = capsys.readouterr()
    assert "pip install matplotlib, then draw" in printed.err and "drawn" not in printed.out
    assert not list(tmp_path.glob("*.png"))


def test_a_dry_run_prints_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--backend transformer_engine --dry-run --shapes llama --sample --rounds 3"
    assert bench(f"{words} --only fsdp-eager,fsdp-graphs", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = "# llama.default.8layers-2mb-2gpus"
    names = [line.partition(":")[0] for line in lines if line.startswith(begin)]
    assert names == [
        f"{begin}.fsdp-eager",
        f"{begin}.fsdp-graphs",
        f"{begin}.fsdp-graphs.round2",
        f"{begin}.fsdp-eager.round2",
        f"{begin}.fsdp-eager.round3",
        f"{begin}.fsdp-graphs.round3",
    ]
    commands = [shlex.split(line) for line in lines if "torch.distributed.run" in line]
    environments = [dict(w.split("=", 1) for w in c if w.split("=")[0].isupper()) for c in commands]
    windows = [given(env)[0] for env in environments]
    assert [(w.timed, w.probed, w.sampled, w.profiled) for w in windows] == (
        [(20, 4, 20, 2)] * 2 + [(20, 0, 0, 0)] * 4
    )
    steps = [command[command.index("--train-iters") + 1] for command in commands]
    assert steps == [str(one.steps) for one in windows]
    assert lines[-1].startswith("# 6 runs in 3 rounds, about")


def test_a_dry_run_prints_commands_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--backend transformer_engine --dry-run --shapes llama qwen3-moe --grouped-gemm both"
    assert bench(f"{words} --profile-steps 3 -- --seed 7", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if "torch.distributed.run" in line]
    assert len(commands) == len(CONFIGURATIONS) + 2 * (len(CONFIGURATIONS) - 1)
    for line in commands:
        words_of = shlex.split(line)
        env = dict(word.split("=", 1) for word in words_of if word.split("=")[0].isupper())
        assert given(env)[0].profiled == 3
        assert words_of[-2:] == ["--seed", "7"]
    assert sum("NVTE_USE_CUTLASS_GROUPED_GEMM=1" in line for line in commands) == 6
    assert lines[-1].startswith("# 19 runs, about")
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize(
    ("words", "sampled", "native"),
    [("", 0, False), ("--sample", 20, False), ("--sample-native --sample-steps 5", 5, True)],
)
def test_native_frames_are_asked_for_by_a_flag_of_their_own(
    words: str, sampled: int, native: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "--backend transformer_engine --dry-run --shapes llama --only fsdp-graphs"
    assert bench(f"{plan} {words}", tmp_path) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "torch.distr" in line)
    env = dict(word.split("=", 1) for word in shlex.split(line) if word.split("=")[0].isupper())
    windows, _ = given(env)
    assert (windows.sampled, windows.native) == (sampled, native)


def test_a_profile_needs_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench(f"{TAPE} --sample", tmp_path) == USAGE_ERROR
    assert "pip install 'megatron-cg[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"{TAPE} --only ddp-eager", "without the configuration ddp-eager"),
        (f"{TAPE} --profile-steps 2", "without a profile of a GPU"),
        (f"{TAPE} --layers 9", "without 9 layers"),
        (f"{TAPE} --microbatches 2", "without 2 microbatches"),
        (f"{TAPE} -- --seed 1", "without --seed 1"),
        ("--backend tape --shapes mamba-hybrid", "cannot be built on a CPU"),
        ("--shapes nope", "there is no preset 'nope'"),
        ("--only nope", "there is no such configuration"),
        ("--ablate-fast-path unshrad", "unshrad (did you mean unshard?): the fast path has no"),
        ("--ablate-fast-path --only fsdp-eager", "leave out --only and --scale"),
        ("--ablate-fast-path --scale layers=1,2", "leave out --only and --scale"),
        ("--scale depth=1,2", "--scale depth=1,2: write layers"),
        ("--report --compare /nowhere.json", "/nowhere.json cannot be read"),
        ("--report", "holds no results"),
        (f"{TAPE} --data-path /nowhere", "--data-path /nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(words, tmp_path) == USAGE_ERROR
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()


def test_too_few_gpus_leave_a_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--backend transformer_engine --shapes llama --nproc 64 --only fsdp-eager"
    assert bench(words, tmp_path) == INCOMPLETE
    assert "it needs 64 GPUs" in capsys.readouterr().err
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert run["status"] == "left out"
    assert "fsdp-eager (left out)" in (tmp_path / "bench.md").read_text()
