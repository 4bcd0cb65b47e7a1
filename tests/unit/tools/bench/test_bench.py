"""The command, with processes that print what Megatron would."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.conftest import Cli

LAUNCHER = Path(__file__).with_name("fake_launcher")
LINE = ["--", sys.executable, str(LAUNCHER), "pretrain_gpt.py", "--use-megatron-fsdp"]
STEPS = "--settle-steps 3 --steps 4"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"gpus": [H100] * 2, "driver": "580", "versions": {"torch": "2.11.0"}}
    monkeypatch.setattr("megatron_cg.tools.bench.bench_command.machine", lambda: here)
    monkeypatch.delenv("CUBLASLT_HEURISTICS_CACHE_CAPACITY", raising=False)


def test_runs_are_made_in_turn_and_compared_with_the_first(tmp_path: Path, cli: Cli) -> None:
    ended = cli(f"bench {STEPS} --work-dir {tmp_path}/work --out {tmp_path}/out.json", *LINE)
    assert ended.code == 0
    eager, _, graphs = runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["configuration"] for run in runs] == ["eager", "ddp", "graphs"]
    assert eager["step_ms"] == [800.0, 801.0, 800.0, 801.0]
    assert {key: graphs[key] for key in ("ms", "quartiles", "tflops", "tokens")} == {
        "ms": 200.5,
        "quartiles": [200.0, 201.0],
        "tflops": pytest.approx(493.3, abs=0.1),
        "tokens": pytest.approx(4 * 4096 / 2 / 0.2005),
    }
    assert (graphs["allocated_mib"], graphs["reserved_mib"]) == (217.0, 300.0)
    assert eager["loss"] == pytest.approx(4.93)
    # The cache is as large where this package's launcher does not set it.
    logs = [(tmp_path / "work" / name / "log.txt") for name in ("eager", "ddp", "graphs")]
    assert all("a cache of 262144" in log.read_text() for log in logs)
    (row,) = [line for line in ended.out.splitlines() if "| graphs: " in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == [
        *("attn mlp", "200.5", "200.0 to 201.0", "0.250", "493.2"),
        *("40,858", "217", "300"),
    ]


def test_without_a_gpu_it_ends_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, Any] = {"gpus": [], "driver": None, "versions": {}}
    monkeypatch.setattr("megatron_cg.tools.bench.bench_command.machine", lambda: here)
    ended = cli("bench", *LINE)
    assert ended.code == 2 and "finds no GPU" in ended.err


@pytest.mark.parametrize("fails", ["ddp", "eager"])
def test_a_run_that_fails_is_named_with_its_log_and_the_others_are_made(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("FAILS", fails)
    ended = cli(f"bench {STEPS} --out {tmp_path}/out.json", *LINE)
    made = json.loads((tmp_path / "out.json").read_text())
    reason = "ended with exit code 1: torch.OutOfMemoryError"
    assert ended.code == 3
    assert f"CUDA out of memory.\nthe run {fails} failed: {reason}" in ended.err
    assert f"{fails} failed: {reason}" in ended.out
    # Ratios are to the first run that was made.
    first = 800.5 if fails == "ddp" else 400.5
    assert f"| {200.5 / first:.3f} " in ended.out
    assert made["runs"][("eager", "ddp").index(fails)]["tail"][0].startswith(fails)


def test_a_log_with_too_few_steps_is_a_failure_and_not_a_number(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("STEPS", "5")
    ended = cli(f"bench {STEPS} --only graphs", *LINE)
    assert ended.code == 3 and "| graphs" not in ended.out
    assert "graphs failed: the log has 5 steps, and 3 + 4" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "bash", "train.sh"], "ends with .py"),
        (["--", "torchrun", "pretrain_gpt.py"], "no --use-megatron-fsdp"),
        (["--only", "graps", *LINE], "--only graps: there are"),
        (["--only", "eager-gemm", *LINE], "no --num-experts"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    words: list[str], said: str, cli: Cli
) -> None:
    ended = cli("bench", *words)
    assert ended.code == 2 and said in ended.err
