"""Command lines with mistakes, and the command itself; one process makes all plans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_cg.tools.cli import plan as command
from megatron_cg.tools.plan.process import Plan, PlanError, make_plans
from megatron_cg.tools.plan.request import Request, read_request
from tests.unit.tools.plan.read_plans import on_preset, rules, shown

MISTAKES = (
    "--cuda-graph-modules attn moe_router --pipeline-model-parallel-size 3 "
    "--recompute-granularity full --recompute-method uniform"
)

REFUSED_WHILE_BUILDING: dict[str, tuple[str, list[str]]] = {
    "Invalid length of moe_layer_pattern": ("deepseek-v3", ["--num-layers", "16"]),
    "k not in range for dimension": (
        "mixtral-tiny",
        ["--num-experts", "4", "--moe-router-topk", "8"],
    ),
    "is invalid for input of size": (
        "llama-tiny",
        ["--group-query-attention", "--num-query-groups", "3"],
    ),
    "negative dimension -5": ("llama-tiny", ["--seq-length", "-5"]),
    "ValueError: cannot convert float NaN": (
        "mixtral-tiny",
        ["--moe-expert-capacity-factor", "nan"],
    ),
    "Storage size calculation overflowed": ("llama-tiny", ["--hidden-size", "100000000000"]),
    "Overflow when unpacking long": ("llama-tiny", ["--ffn-hidden-size", "9" * 20]),
    "ZeroDivisionError: ": ("llama-tiny", ["--hidden-size", "0"]),
}
"""By the error text of Megatron, or of torch inside it."""

REQUESTS = {
    "llama-tiny": on_preset(""),
    "mistakes": on_preset(MISTAKES),
    "only Megatron minds": on_preset("--num-attention-heads 7"),
    "indivisible": read_request("mixtral-tiny", ["--expert-model-parallel-size", "2"], nproc=3),
    **{name: read_request(*words) for name, words in REFUSED_WHILE_BUILDING.items()},
    "too many ranks": on_preset("", nproc=10**9),
    "without the launcher": read_request(
        None, ["torchrun", "pretrain_gpt.py", *on_preset("").words], nproc=2
    ),
    "without the launcher or graphs": read_request(
        None, ["torchrun", "train.py", "--cuda-graph-impl", "none", "--lr", "1"], nproc=2
    ),
    "not a range": on_preset("", cg_layers=["attn:x"]),
    "unknown flag": on_preset("--cuda-graf-modules attn"),
    "bad value": on_preset("--num-layers many"),
    "mistyped scope": on_preset("--cuda-graph-modules moe_rooter"),
    "foreign flag": Request(
        "train.py", (*on_preset("--fsdp-double-bufer").words, "--my-flag", "1"), own_flags=True
    ),
    "a YAML file": on_preset("--yaml-cfg run.yaml"),
    "help": on_preset("--help"),
    "native in FP8": on_preset("--cg-backend native --fp8-format hybrid"),
    "no graphs": on_preset("--cuda-graph-impl none"),
    "expandable": Request(
        "x", on_preset("").words, 2, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return dict(zip(REQUESTS, make_plans(list(REQUESTS.values()), timeout=3600.0), strict=True))


def test_three_mistakes_are_named_at_once(plans: dict[str, Plan]) -> None:
    plan = plans["mistakes"]
    assert rules(plan) == {"moe-without-experts", "pipeline-parallel", "full-recompute-of-parts"}
    assert command.exit_code(plan) == command.BROKEN
    text = " ".join(shown(plan).split())
    for item in plan["violations"]:
        assert item["found"] in text and f"Instead: {item['remedy']}" in text
    # Megatron's own rule is shown beside ours.
    assert plan["megatron"] and plan["megatron"] in text and "layers" not in plan


def test_what_only_megatron_refuses_is_refused(plans: dict[str, Plan]) -> None:
    plan = plans["only Megatron minds"]
    assert not plan["violations"] and "num_attention_heads" in plan["megatron"]
    assert command.exit_code(plan) == command.BROKEN


def test_what_megatron_refuses_with_its_groups_is_refused_too(plans: dict[str, Plan]) -> None:
    plan = plans["indivisible"]
    assert "world_size (3) is not divisible by expert" in plan["megatron"]
    assert command.exit_code(plan) == command.BROKEN and "layers" not in plan


@pytest.mark.parametrize("said", REFUSED_WHILE_BUILDING)
def test_what_megatron_refuses_while_it_builds_the_model_is_one_line(
    plans: dict[str, Plan], said: str
) -> None:
    plan = plans[said]
    assert said in plan["megatron"] and len(plan["megatron"].splitlines()) == 1
    assert "frame #" not in plan["megatron"] and "layers" not in plan
    assert command.exit_code(plan) == command.BROKEN
    assert f"Megatron stops with: {plan['megatron'][:20]}" in shown(plan)


def test_more_ranks_than_can_be_listed_are_refused(plans: dict[str, Plan]) -> None:
    plan = plans["too many ranks"]
    assert plan["usage"] == "1,000,000,000 GPUs, and a plan is made for at most 262,144"
    assert command.exit_code(plan) == command.UNREADABLE


def test_a_command_without_the_launcher_is_told_where_it_goes(plans: dict[str, Plan]) -> None:
    plan = plans["without the launcher"]
    assert rules(plan) == {"launcher"} and command.exit_code(plan) == command.BROKEN
    assert "Instead: write -m megatron_cg before pretrain_gpt.py" in " ".join(shown(plan).split())
    # A run that asks for no graphs needs none.
    assert rules(plans["without the launcher or graphs"]) == {"no-graphs"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown flag", ("--cuda-graf-modules", "--cuda-graph-modules")),
        ("bad value", ("many",)),
        ("help", ("--help",)),
        ("a YAML file", ("--yaml-cfg", "starts:", "on the command line")),
        ("mistyped scope", ("moe_rooter", "did you mean moe_router?", "attn", "mamba")),
    ],
)
def test_flags_that_cannot_be_read_are_a_usage_error(
    plans: dict[str, Plan], name: str, words: Sequence[str]
) -> None:
    plan = plans[name]
    assert command.exit_code(plan) == command.UNREADABLE
    assert all(word in plan["usage"] and word in shown(plan) for word in words)


def test_a_script_may_have_flags_of_its_own(plans: dict[str, Plan]) -> None:
    plan = plans["foreign flag"]
    assert command.exit_code(plan) == command.READY
    (note,) = [note for note in plan["notes"] if "the script's own" in note]
    # One that may be a slip is said to be.
    assert "--fsdp-double-bufer (did you mean --fsdp-double-buffer?) --my-flag 1" in note


def test_a_run_without_graphs_is_said_to_have_none(plans: dict[str, Plan]) -> None:
    (item,) = plans["no graphs"]["violations"]
    assert item["rule"] == "no-graphs"
    assert item["remedy"] == "type --cuda-graph-impl transformer_engine"


def test_the_rules_are_those_of_the_chosen_backend(plans: dict[str, Plan]) -> None:
    assert rules(plans["native in FP8"]) == {"native-backend-fp8"}


def test_variables_before_the_command_are_checked(plans: dict[str, Plan]) -> None:
    assert rules(plans["expandable"]) == {"expandable-segments"}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", ["llama-tiny", "mistakes", "unknown flag", "not a range"])
def test_the_command_prints_the_plan_and_its_exit_code(
    plans: dict[str, Plan],
    name: str,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The process that the command starts is the one that made all plans above.
    monkeypatch.setattr(
        "megatron_cg.tools.plan.process.make_plans", lambda _requests: [plans[name]]
    )
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["llama-tiny", *(["--json"] if as_json else [])])
    assert command.run(args, []) == command.exit_code(plans[name])
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed) == plans[name]
    else:
        assert printed.startswith(plans[name]["title"])
        # As it was typed: ":x:" is no picture.
        assert "attn:x: 'x' is not" in printed or name != "not a range"


def test_a_process_that_makes_no_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"within 0\.01 seconds"):
        make_plans([REQUESTS["llama-tiny"]], timeout=0.01)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(PlanError, match="exit code 1"):
        make_plans([REQUESTS["llama-tiny"]])


@pytest.fixture
def noisy_worker(plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Let the worker be a script that prints on both streams, and answers with this plan."""
    made = tmp_path / "made.json"
    made.write_text(json.dumps([plans["bad value"]]))
    worker = tmp_path / "worker.sh"
    worker.write_text(f'#!/bin/sh\necho loud\necho louder >&2\ncp "{made}" "$4"\n')
    worker.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(worker))
    return plans["bad value"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_plan_that_takes_a_while_says_that_it_works(
    terminal: bool,
    noisy_worker: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("megatron_cg.tools.plan.process.PATIENCE", 0.0)
    assert make_plans([REQUESTS["bad value"]]) == [noisy_worker]
    printed, said = capfd.readouterr()
    assert "Megatron builds the model" in said and printed == ""
    assert terminal or len(said.splitlines()) == 1
    monkeypatch.setattr("megatron_cg.tools.plan.process.PATIENCE", 600.0)
    assert make_plans([REQUESTS["bad value"]])[0]["usage"]
    assert capfd.readouterr() == ("", "")
