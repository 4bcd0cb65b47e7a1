"""``megatron-cg align`` from its arguments to its exit code, table and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align import align_command as command
from megatron_cg.tools.align.compare import DIFFERENT, FAILED, IDENTICAL, Comparison, Value
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.cli.main import main

SAME = Value(0, 1, "lm loss", (1.0).hex(), (1.0).hex())
OTHER = Value(1, 2, "gradient norm", (1.0).hex(), (1.5).hex())
RECORD = {
    "versions": {"torch": "2.11.0"},
    "device": "a GPU",
    "steps": [{"milliseconds": time} for time in (900.0, 800.0, 10.0, 20.0, 30.0)],
    "peak_allocated_bytes": 7,
}


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """The least that a run needs: one small file of text."""
    (tmp_path / "text").write_text("some text")
    return ["--text", str(tmp_path / "text")]


def answer(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> dict[str, Any]:
    """Let both backends give ``outcome``; returns what they are asked."""
    asked: dict[str, Any] = {}

    def on_gpus(plan: Any, data: Any, options: Any) -> Outcome:
        asked.update(plan=plan, data=data, options=options)
        return outcome

    def on_tape(preset: Any, data: Any, options: Any, **rest: Any) -> Outcome:
        asked.update(preset=preset, data=data, options=options, **rest)
        return outcome

    monkeypatch.setattr(command, "check_gpus", lambda *_: None)
    monkeypatch.setattr(command, "align_on_gpus", on_gpus)
    monkeypatch.setattr(command, "align_on_tape", on_tape)
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
    text: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, Outcome(comparison))
    assert main(["align", "--backend", "tape", *text]) == code
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["tape", "transformer_engine"])
def test_the_type_of_the_model_can_be_chosen(
    backend: str, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "", (SAME,), 4)))
    for words, bf16 in ((["--dtype", "fp32"], False), ([], True)):
        assert main(["align", "--backend", backend, *words, *text]) == 0
        assert (asked["bf16"] if backend == "tape" else asked["plan"].bf16) is bf16


@pytest.mark.parametrize(
    ("backend", "flags"), [("native", ("--cg-backend", "native")), ("transformer_engine", ())]
)
def test_the_native_backend_captures_the_run_with_graphs(
    backend: str, flags: tuple[str, ...], text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "", (SAME,), 4)))
    assert main(["align", "--backend", backend, *text]) == 0
    assert asked["plan"].graph_extra == flags


def test_flags_about_graphs_reach_the_graph_run(
    text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "", (SAME,), 4)))
    extra = ["--", "--seed", "7", "--cg-moe-rows", "1.5"]
    assert main(["align", "--backend", "transformer_engine", *text, *extra]) == 0
    assert asked["plan"].graph_extra == ("--cg-moe-rows", "1.5")
    assert asked["plan"].extra == ("--seed", "7")


def test_the_table_shows_numbers_differences_and_shards(
    text: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tuple(f"rank 0 main:w{index}" for index in range(7))
    comparison = Comparison(DIFFERENT, "why", (SAME, OTHER), 9, shards, {"captured": 3})
    answer(monkeypatch, Outcome(comparison, log_tail="[the end]"))
    main(["align", "--backend", "tape", *text])
    out = capsys.readouterr().out
    assert "gradient norm (rank 1)" in out and "5.000e-01" in out and "differ" in out
    assert "9, different: 7" in out and "main:w4" in out and "and 2 more" in out
    assert "3 captured" in out and "[the end]" in out
    assert "CPU tape: a recording of ATen operations replaces the CUDA graph" in out


def test_the_json_holds_every_number_and_what_it_took(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(DIFFERENT, "why", (SAME, OTHER), 9, ("w",), {"captured": 3})
    outcome = Outcome(comparison, {"eager": ["python"]}, eager={0: RECORD}, graphed=None)
    answer(monkeypatch, outcome)
    target = tmp_path / "new" / "out.json"
    main(["align", "--backend", "tape", "--json", str(target), *text])
    data = json.loads(target.read_text())
    assert (data["status"], data["reason"], data["preset"]) == (DIFFERENT, "why", "llama-tiny")
    assert data["values"][1]["graphs"] == (1.5).hex() and data["values"][1]["same"] is False
    assert data["shards"] == {"compared": 9, "different": ["w"]}
    assert data["commands"] == {"eager": ["python"]} and data["graphs"] == {"captured": 3}
    assert data["notice"].startswith("CPU tape")
    assert data["runs"]["graphs"] is None
    # The first half of the steps, where warmup and capture are, does not count.
    assert data["runs"]["eager"]["median_step_milliseconds"] == 20.0


@pytest.mark.parametrize("made", [True, False])
def test_a_kept_folder_is_said_to_make_a_page_if_the_runs_left_records(
    made: bool,
    text: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = Outcome(Comparison(IDENTICAL if made else FAILED, ""))
    answer(monkeypatch, replace(outcome, eager={0: RECORD}, graphed={0: RECORD} if made else None))
    folder = tmp_path / ("a long name " * 9)
    main(["align", "--backend", "tape", "--work-dir", str(folder), *text])
    page = f"a page of it: megatron-cg report '{folder}'\n"
    assert (page in capsys.readouterr().out) is made
    main(["align", "--backend", "tape", *text])
    assert "megatron-cg report" not in capsys.readouterr().out


def test_json_that_was_there_stays_until_there_is_more(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("{}")
    for path in (old, new):
        line = ["align", "--backend", "tape", "--script", "x.py", "--json", str(path)]
        assert main([*line, *text]) == 2
    assert old.read_text() == "{}" and not new.exists()


def test_arguments_reach_the_plan(text: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    line = "align --preset mixtral-tiny --backend transformer_engine --steps 14 --warmup-steps 2"
    rest = "--scopes moe_router --nproc 4 --mutate x --parallel-runs -- --seed 7 --preset --"
    assert main([*line.split(), *text, *rest.split()]) == 0
    plan, options = asked["plan"], asked["options"]
    assert (plan.steps, plan.warmup_steps, plan.nproc) == (14, 2, 4)
    assert plan.scopes == ("moe_router",) and plan.extra == ("--seed", "7", "--preset", "--")
    assert "--num-experts" in plan.model and plan.script.name == "pretrain_gpt.py"
    assert options.mutation == "x" and options.parallel


@pytest.mark.parametrize(("scopes", "expected"), [([], ("attn", "moe_router")), (["--scopes"], ())])
def test_scopes_are_the_presets_unless_given(
    scopes: list[str], expected: tuple[str, ...], text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, Outcome(Comparison(IDENTICAL, "")))
    line = ["align", "--preset", "qwen3-moe", "--backend", "transformer_engine"]
    main([*line, *text, *scopes])
    assert asked["plan"].scopes == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--preset nope", "there is no preset 'nope'"),
        ("--backend tape --data-path /nowhere/tokens", "there is no file /nowhere/tokens.bin"),
        ("--backend tape --text /nowhere/text", "No such file"),
        ("--backend tape --preset mamba-hybrid-tiny", "cannot be built on a CPU"),
        ("--backend tape --script x.py", "cannot take --script x.py"),
        ("--backend tape -- --seed 1", "cannot take --seed 1"),
        ("--backend tape --cg-layers attn:0-1", "cannot take --cg-layers attn:0-1"),
        ("--backend tape --mutate x", "--mutate is for a script"),
        ("--backend tape --steps 3", "leaves no step after --warmup-steps 3"),
    ],
)
def test_what_cannot_be_run_is_refused_with_code_2(
    line: str, message: str, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    cut = words.index("--") if "--" in words else len(words)
    given = {"--text", "--data-path"} & set(words)
    assert main(["align", *words[:cut], *([] if given else text), *words[cut:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--steps 0", "--steps x", "--warmup-steps -1", "--nproc 0"])
def test_numbers_are_checked(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["align", *line.split()])
    assert caught.value.code == 2 and line.split(maxsplit=1)[0] in capsys.readouterr().err
