"""``megatron-cg align`` from its arguments to its exit code, table and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_cg.tools.align import align_command as command
from megatron_cg.tools.align import run
from megatron_cg.tools.align.compare import DIFFERENT, FAILED, IDENTICAL, Comparison, Outcome, Value
from megatron_cg.tools.cli.main import main

SAME = Value(0, 1, "lm loss", (1.0).hex(), (1.0).hex())
OTHER = Value(1, 2, "gradient norm", (1.0).hex(), (1.5).hex())


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "from_text", lambda *_: Path("text"))


def answer(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> dict[str, str]:
    """Let the runs have ``outcome``; returns the command line of each by its name."""
    asked: dict[str, str] = {}

    def made(runs: Sequence[run.Run], timeout: float) -> Outcome:
        asked.update({one.name: " ".join(one.words) for one in runs})
        return outcome

    monkeypatch.setattr(run, "check_gpus", lambda _: None)
    monkeypatch.setattr(run, "run_and_compare", made)
    return asked


@pytest.mark.parametrize(
    ("comparison", "code", "shown"),
    [
        (Comparison(IDENTICAL, "", (SAME,), 4), 0, "IDENTICAL, to the last bit"),
        (Comparison(DIFFERENT, "first at step 2", (OTHER,), 4, ("w",)), 1, "first at step 2"),
        (Comparison(FAILED, "the graphs run ended"), 3, "FAILED: the graphs run ended"),
    ],
)
def test_the_verdict_is_the_exit_code(
    comparison: Comparison,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, Outcome(comparison))
    assert main(["align", "--backend", "tape"]) == code
    assert shown in capsys.readouterr().out
    assert main(["align", "--backend", "tape", "--json"]) == code
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["reason"]) == (comparison.status, comparison.reason)


def test_the_table_shows_numbers_differences_and_shards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tuple(f"rank 0 main:w{index}" for index in range(7))
    comparison = Comparison(DIFFERENT, "why", (SAME, OTHER), 9, shards, {"captured": 3})
    answer(monkeypatch, Outcome(comparison, log_tail="[the end]"))
    main(["align", "--backend", "tape"])
    out = capsys.readouterr().out
    assert "gradient norm (rank 1)" in out and "5.000e-01" in out and "differ" in out
    assert "9, different: 7" in out and "main:w4" in out and "main:w5" not in out
    assert "3 captured" in out and "[the end]" in out
    assert "CPU tape: a recording of ATen operations replaces the CUDA graph" in out


def test_a_kept_folder_makes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, Outcome(Comparison(DIFFERENT, "why"), graphed={}))
    folder = tmp_path / "a folder"
    assert main(["align", "--backend", "tape", "--work-dir", str(folder)]) == 1
    assert f"a page of it: megatron-cg report '{folder}'\n" in capsys.readouterr().out


def test_arguments_reach_the_runs_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    line = "align --preset mixtral-tiny --backend native --steps 14 --warmup-steps 2 --nproc 4 "
    line += "--scopes moe_router -- --cg-grouped-gemm torch --seed 7 --cg-moe-rows 1.5 --preset --"
    assert main(line.split()) == 0
    for words in asked.values():
        assert "--nproc-per-node 4" in words and "--train-iters 14" in words
        assert "pretrain_gpt.py" in words and "--num-experts" in words
        assert "--cg-grouped-gemm torch --seed 7 --preset -- --cg-record" in words
    graphs = "--cuda-graph-modules moe_router --cuda-graph-warmup-steps 2"
    assert graphs in asked["graphs"] and "--cuda-graph-impl none" in asked["eager"]
    flags = "--cg-backend native --cg-moe-rows 1.5"
    assert flags in asked["graphs"] and flags not in asked["eager"]


def test_megatron_fsdp_v2_has_flags_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    monkeypatch.setattr(command, "installed_version", lambda _: "0.20.0")
    v2 = ["--megatron-fsdp-version", "2"]
    main(["align", "--backend", "transformer_engine", *v2])
    for words in asked.values():
        assert " ".join(v2) in words and "--cuda-graph-impl" in words
        assert "--use-distributed-optimizer" not in words and "--fsdp-d" not in words
    main(["align", "--backend", "tape", *v2])
    assert all('"megatron_fsdp_version": 2' in words for words in asked.values())
    monkeypatch.setattr(command, "installed_version", lambda _: "0.19.2")
    assert main(["align", *v2]) == 2
    assert "have that version from 0.20 on" in capsys.readouterr().err


def test_arguments_reach_the_runs_on_the_tape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    line = "align --preset mixtral-tiny --backend tape --scopes attn moe_router --nproc 640"
    assert main(line.split()) == 0
    assert asked["eager"].replace('"graphs": false', '"graphs": true') == asked["graphs"].replace(
        "graphs/record", "eager/record"
    )
    assert '"graph_modules": ["attn", "moe_router"]' in asked["graphs"]
    assert " 640 " in asked["graphs"]
    assert "warning: 640 processes share" in capsys.readouterr().out


def test_scopes_are_the_presets_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    line = ["align", "--preset", "qwen3-moe", "--backend", "transformer_engine"]
    main(line)
    assert "--cuda-graph-modules attn moe_router --cuda-graph-warmup" in asked["graphs"]
    main([*line, "--scopes"])
    assert "--cuda-graph-impl transformer_engine --cuda-graph-warmup" in asked["graphs"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--preset nope", "there is no preset 'nope'; there are "),
        ("--backend tape --preset mamba-hybrid-tiny", "cannot be built on a CPU"),
        ("--backend tape --script x.py", "cannot take --script x.py"),
        ("--backend tape -- --seed 1", "cannot take --seed 1"),
        ("--backend tape --scopes moe_router", "llama-tiny has no moe_router to capture"),
        ("--backend tape --preset mixtral --scopes mamba moe", "has no mamba and moe to capture"),
    ],
)
def test_what_cannot_be_run_is_refused_with_code_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["align", *line.split()]) == 2
    assert message in capsys.readouterr().err
