"""The command from end to end: on the tape for real, on GPUs as far as its commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_cg.bench.contenders import CONTENDERS, EAGER, GRAPHS
from megatron_cg.bench.windows import given
from megatron_cg.cli.bench import INCOMPLETE
from megatron_cg.cli.main import USAGE_ERROR, main

TAPE = "--backend tape --shapes llama-tiny --nproc 1 --timed-steps 2 --settle-steps 1"


def bench(words: str, out: Path) -> int:
    before, separator, extra = words.partition(" -- ")
    return main(["bench", *before.split(), "--out", str(out), *separator.split(), *extra.split()])


def test_the_tape_runs_from_end_to_end_and_results_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(f"{TAPE} --warmup-steps 1 --probe-steps 1", tmp_path) == 0
    data = json.loads((tmp_path / "bench.json").read_text())
    eager, graphs = data["runs"]
    assert [run["key"]["contender"] for run in data["runs"]] == [EAGER, GRAPHS]
    assert eager["invocation"] == graphs["invocation"]
    for run in data["runs"]:
        (rank,) = run["ranks"]
        assert rank["finished"] and len(rank["timed"]["step_ms"]) == 2
        assert run["machine"]["processors"] and rank["versions"]["megatron-core"]
    assert eager["ranks"][0]["captures"] == []
    (capture,) = graphs["ranks"][0]["captures"]
    assert capture["after_step"] == 1 and capture["seconds"] > 0
    assert graphs["ranks"][0]["timed"]["counters"]["replayed"] == 2 * 3
    # The tape is as exact as the graphs that it stands for.
    assert eager["ranks"][0]["timed"]["loss"] == graphs["ranks"][0]["timed"]["loss"]
    phases = {row["phase"] for row in graphs["ranks"][0]["probed"]["phases"]}
    assert {"unshard", "reshard", "gradient hand-off", "gradient reduce", "replay"} <= phases
    assert {"guard", "votes"} <= phases
    report = (tmp_path / "bench.md").read_text()
    assert "CPU tape" in report and "Scopes: attn." in report
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2

    earlier = tmp_path / "earlier.json"
    earlier.write_text((tmp_path / "bench.json").read_text())
    capsys.readouterr()
    assert bench(f"--report --compare {earlier}", tmp_path) == 0
    report = (tmp_path / "bench.md").read_text()
    assert "| 1.000 |" in report.partition("## Compared")[2] and "old / new" in report
    # To a file or a pipe the tables go as they are in the report, not drawn as for a screen.
    printed, _, files = capsys.readouterr().out.partition("written: ")
    assert printed.strip() == report.strip()
    assert f"{tmp_path / 'bench.json'} and {tmp_path / 'bench.md'}\n" in files
    # Where there is no matplotlib nothing is drawn.
    assert all(f"drawn: {picture}\n" in files for picture in tmp_path.glob("*.png"))


def test_a_dry_run_prints_commands_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--backend transformer_engine --dry-run --shapes llama qwen3-moe --grouped-gemm both"
    assert bench(f"{words} --profile-steps 3 -- --seed 7", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if "torch.distributed.run" in line]
    assert len(commands) == len(CONTENDERS) + 2 * (len(CONTENDERS) - 1)
    for line in commands:
        words_of = shlex.split(line)
        env = dict(word.split("=", 1) for word in words_of if word.split("=")[0].isupper())
        assert given(env)[0].profiled == 3
        assert words_of[-2:] == ["--seed", "7"]
    assert sum("NVTE_USE_CUTLASS_GROUPED_GEMM=1" in line for line in commands) == 5
    assert lines[-1].startswith("# 16 runs, about")
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


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"{TAPE} --only ddp-eager", "without the contender ddp-eager"),
        (f"{TAPE} --profile-steps 2", "without a profile of a GPU"),
        (f"{TAPE} --layers 9", "without 9 layers"),
        (f"{TAPE} -- --seed 1", "without --seed 1"),
        ("--backend tape --shapes mamba-hybrid", "cannot be built on a CPU"),
        ("--shapes nope", "there is no preset 'nope'"),
        ("--only nope", "there is no such contender"),
        ("--scale depth=1,2", "--scale depth=1,2: write layers"),
        ("--report --compare /nowhere.json", "/nowhere.json cannot be read"),
        (f"{TAPE} --data-path /nowhere", "--data-path /nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(words, tmp_path) == USAGE_ERROR
    assert reason in capsys.readouterr().err


def test_too_few_gpus_leave_a_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--backend transformer_engine --shapes llama --nproc 64 --only fsdp-eager"
    assert bench(words, tmp_path) == INCOMPLETE
    assert "it needs 64 GPUs" in capsys.readouterr().err
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert run["status"] == "left out"
    assert "fsdp-eager (left out)" in (tmp_path / "bench.md").read_text()
