"""The benchmark runs on the tape, and on GPUs would start what it says. Nothing is timed here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from benchmarks.guard_cost import measure
from benchmarks.overheads import FAILED, main
from benchmarks.probe import probing
from benchmarks.runs import TRANSFORMER_ENGINE, Request
from megatron_cg.consensus.boundary import Boundary
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.replay.guard.inputs import Inputs
from megatron_cg.replay.guarded_graph import GuardedGraph
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.telemetry.record import Recorder
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.token_data import TokenStream

PRESET = "qwen3-moe-tiny"
LAYERS, STEPS = 3, 7


def test_a_few_steps_on_the_tape_give_every_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"--backend tape --preset {PRESET} --steps {STEPS} --settle 1 --out {out}"
    assert main(words.split()) == 0
    data = json.loads((out / "overheads.json").read_text())
    assert data["run"]["first_counted_step"] == 5 and data["run"]["preset"] == PRESET
    assert data["versions"]["megatron-core"] and data["machine"]["processors"]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    for rank in data["ranks"]:
        assert (rank["steps"], rank["replays"], rank["mismatched"]) == (3, LAYERS, 0)
        assert rank["tensors_copied"] + rank["tensors_in_place"] == 3 and rank["bytes_copied"] > 0
        for name in ("step_ms", "guard_us", "around_us", "vote_us", "issuing_us", "waiting_us"):
            assert 0 < rank[name]["median"] <= rank[name]["p95"]
        assert rank["issuing_us"]["mean"] + rank["waiting_us"]["mean"] < rank["vote_us"]["mean"]
        kinds = [vote["kind"] for vote in rank["votes_waited_for"]]
        assert kinds == ["capture start", "capture end"]
    assert data["share"] == max(rank["share"] for rank in data["ranks"])
    assert "guards a step, mean" in (out / "overheads.md").read_text()
    assert "CPU tape" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--backend tape --steps 4 --settle 1", "--steps 4 leaves none to count"),
        ("--backend tape -- --seed 1", "cannot take --seed 1"),
        ("--backend transformer_engine --nproc 64", "--nproc 64 needs as many GPUs"),
        ("--preset nope", "there is no preset 'nope'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, separator, extra = words.partition(" -- ")
    argv = [*before.split(), "--out", str(tmp_path), *separator.split(), *extra.split()]
    assert main(argv) == FAILED
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("deterministic", [False, True])
def test_gpus_train_the_example_under_a_probe_and_as_in_earnest(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "gpu_count", lambda: 2)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    request = Request(
        load_preset(PRESET),
        TRANSFORMER_ENGINE,
        nproc=2,
        steps=60,
        extra=("--seed", "1"),
        deterministic=deterministic,
    )
    eager, graphs = runs._on_gpus(request, TokenStream(tmp_path, "", True), tmp_path)
    for run in (eager, graphs):
        script = next(word for word in run.words if word.endswith("measured.py"))
        assert Path(script).is_file()
        assert ("--deterministic-mode" in run.words) is deterministic
        assert run.env["NCCL_ALGO"] == ("Ring" if deterministic else "Tree")
        assert ("CUBLAS_WORKSPACE_CONFIG" in run.env) is deterministic
        root = Path(run.env["PYTHONPATH"].split(os.pathsep)[0])
        assert (root / "benchmarks").is_dir() and (root / "megatron_cg").is_dir()
        assert run.words[-4:-2] == ["--seed", "1"]
    assert "--cuda-graph-modules" in graphs.words and "--cuda-graph-modules" not in eager.words


def test_a_probe_leaves_nothing_behind() -> None:
    def now() -> list[Any]:
        return [
            vars(owner)[name]
            for owner, name in (
                (Boundary, "after_step"),
                (MismatchPolicy, "begin_step"),
                (Agreement, "agree"),
                (Inputs, "copied"),
                (GuardedGraph, "_guard_backward"),
                (Recorder, "finish"),
            )
        ]

    before = now()
    with pytest.raises(ZeroDivisionError), probing():
        assert all(one is not two for one, two in zip(before, now(), strict=True))
        raise ZeroDivisionError
    assert now() == before


@pytest.mark.parametrize("experts", [0, 4])
def test_every_clause_of_a_guard_is_timed(experts: int, one_rank: None) -> None:
    costs = measure(experts, calls=2)
    assert all(cost > 0 for cost in costs.values())
    assert {"training", "autograd", "autocast", "numerics", "objects", "hooks"} < set(costs)
    assert {"addresses, forward", "addresses, backward", "all, forward"} < set(costs)
