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
from megatron_cg.tools.bench.runs.commands import SCRIPT
from megatron_cg.tools.bench.runs.configurations import (
    CONFIGURATIONS,
    EAGER,
    EAGER_FAST_PATH,
    FULL,
    GRAPHS,
    PLAIN,
)
from megatron_cg.tools.cli.main import USAGE_ERROR, main

TAPE = "--backend tape --shapes llama-tiny --nproc 1 --timed-steps 2 --settle-steps 1"
PROBED = f"{TAPE} --warmup-steps 1 --probe-steps 1"


def bench(words: str, out: Path) -> int:
    before, separator, extra = words.partition(" -- ")
    return main(["bench", *before.split(), "--out", str(out), *separator.split(), *extra.split()])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two configurations leave in --out."""
    out = tmp_path_factory.mktemp("made")
    assert bench(PROBED, out) == 0
    return out


def runs_in(out: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((out / "bench.json").read_text())["runs"]
    return runs


def test_the_tape_runs_from_end_to_end(made: Path) -> None:
    runs = runs_in(made)
    eager, graphs = runs
    assert len(list((made / "runs").glob("*.json"))) == 2
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


def test_the_tape_trains_the_same_with_the_fast_path_alone_and_with_graphs_alone(
    made: Path, tmp_path: Path
) -> None:
    assert bench(f"{PROBED} --only {EAGER_FAST_PATH},{PLAIN}", tmp_path) == 0
    ranks = [run["ranks"][0] for run in (runs_in(made)[0], *runs_in(tmp_path))]
    assert len({rank["timed"]["loss"] for rank in ranks}) == 1
    waits = [
        next(row["calls"] for row in rank["probed"]["phases"] if row["phase"] == "unshard: wait")
        for rank in ranks
    ]
    # Unsharding waits once a bucket instead of once a parameter, with the fast path only.
    assert 2 * waits[1] < min(waits[0], waits[2])


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


def planned(
    words: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command and the environment of each run, by its name, as a shell takes them."""
    assert bench(f"--backend transformer_engine --dry-run {words}", out) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [line[2:].partition(":")[0] for line in lines if line.startswith("# ")]
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for line in lines:
        if line and not line.startswith("# "):
            parts = shlex.split(line)
            env = dict(part.split("=", 1) for part in parts if part.split("=")[0].isupper())
            found[names[len(found)]] = (parts[len(env) :], env)
    assert len(found) == len(names) and last.startswith(f"# {len(names)} runs")
    assert not (out / "bench.json").exists()
    return found


def test_a_dry_run_has_every_round_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--shapes llama qwen3-moe --sample-native --rounds 3 --only fsdp-eager,fsdp-graphs"
    runs = planned(words, tmp_path, capsys)
    turns = [EAGER, GRAPHS, f"{GRAPHS}.round2", f"{EAGER}.round2"]
    turns += [f"{EAGER}.round3", f"{GRAPHS}.round3"]
    size = "default.8layers-2mb-2gpus"
    assert list(runs) == [f"{shape}.{size}.{t}" for shape in ("llama", "qwen3-moe") for t in turns]
    windows = [given(env)[0] for _, env in runs.values()]
    assert [(w.timed, w.probed, w.sampled, w.native, w.profiled) for w in windows[:6]] == (
        [(20, 4, 20, True, 2)] * 2 + [(20, 0, 0, False, 0)] * 4
    )
    iters = [words[words.index("--train-iters") + 1] for words, _ in runs.values()]
    assert iters == [str(one.steps) for one in windows]


def test_a_dry_run_prints_commands_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--shapes qwen3-moe llama --grouped-gemm both --profile-steps 3 -- --seed 7"
    runs = planned(words, tmp_path, capsys)
    moe = [name for name in CONFIGURATIONS if name != FULL]
    tables = [("qwen3-moe.default", moe), ("qwen3-moe.cutlass", moe), ("llama.default", None)]
    assert list(runs) == [
        f"{table}.8layers-2mb-2gpus.{name}"
        for table, names in tables
        for name in names or CONFIGURATIONS
    ]
    for name, (command, env) in runs.items():
        assert given(env)[0].profiled == 3 and given(env)[0].sampled == 0
        assert command[-2:] == ["--seed", "7"] and "--deterministic-mode" not in command
        assert command[command.index("--nproc-per-node") + 1] == "2"
        at = command.index("megatron_cg")
        assert command[at - 1] == "-m" and command[at + 1] == str(SCRIPT) and SCRIPT.is_file()
        assert ("NVTE_USE_CUTLASS_GROUPED_GEMM" in env) is (".cutlass." in name)


def test_how_a_profile_is_sampled_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--shapes llama --only fsdp-graphs --sample --sample-steps 5"
    ((_, env),) = planned(words, tmp_path, capsys).values()
    assert (given(env)[0].sampled, given(env)[0].native) == (5, False)


def test_a_profile_needs_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench(f"{TAPE} --sample", tmp_path) == USAGE_ERROR
    assert "pip install 'megatron-cg[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"{TAPE} --only ddp-eager", "does not support the configuration ddp-eager"),
        (f"{TAPE} --profile-steps 2", "does not support a profile of a GPU"),
        (f"{TAPE} --layers 9", "does not support 9 layers"),
        (f"{TAPE} --microbatches 2", "does not support 2 microbatches"),
        (f"{TAPE} -- --seed 1", "does not support --seed 1"),
        ("--backend tape --shapes mamba-hybrid", "cannot be built on a CPU"),
        ("--shapes nope", "there is no preset 'nope'"),
        ("--only nope", "--only nope: there is no such configuration; there are fsdp-eager, "),
        ("--only fsdp-eger", "configuration (did you mean fsdp-eager?); there are"),
        ("--shapes qwen3-moe --only fsdp-full-iteration", "no configuration is left"),
        ("--scale depth=1,2", "--scale depth=1,2: write layers"),
        ("--scale layers", "--scale layers: write layers"),
        ("--scale layers=4,0", "with whole numbers above 0, as in --scale layers=4,8,16"),
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


@pytest.mark.parametrize("name", ["bench.json", "runs/old.json"])
def test_results_that_cannot_be_joined_are_named_before_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / name).write_text("{")
    assert bench(f"{TAPE} --only fsdp-eager", tmp_path) == USAGE_ERROR
    told = capsys.readouterr().err
    assert f"{tmp_path / name} cannot be read" in told and "started" not in told


def test_a_folder_that_cannot_be_written_is_named_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, work = tmp_path / "file", tmp_path / "work"
    out.touch()
    assert bench(f"{TAPE} --only fsdp-eager --work-dir {work}", out) == USAGE_ERROR
    told = capsys.readouterr().err
    assert str(out) in told and "started" not in told


def test_a_shape_that_is_given_twice_is_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{TAPE} --only fsdp-eager,fsdp-eager --dry-run"
    assert bench(words.replace("llama-tiny", "llama-tiny llama-tiny"), tmp_path) == 0
    assert "# 1 runs" in capsys.readouterr().out


def test_too_few_gpus_leave_a_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--backend transformer_engine --shapes llama --nproc 64 --only fsdp-eager"
    assert bench(words, tmp_path) == INCOMPLETE
    assert "it needs 64 GPUs" in capsys.readouterr().err
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert run["status"] == "left out"
    assert "fsdp-eager (left out)" in (tmp_path / "bench.md").read_text()
