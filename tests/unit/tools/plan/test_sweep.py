"""Which of Megatron's options a graph can hold: every one is known, and tried where it can be.

What is found to read on the host is refused by a rule of ours, before a model is built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.arguments.good_configuration import megatron_parser
from tests.unit.arguments.rule_cases import LAYERS
from tests.unit.tools.plan.sweep_cases import (
    CAPTURED,
    GROUPS,
    HOST_READ,
    OUTSIDE,
    READ,
    REFUSED,
    TRIED,
    Try,
    options_of,
)

ROOT = Path(__file__).parents[4]
FINDABLE = {"sinkhorn-router", "dispatcher-reads-counts"}
"""Rules about what a trace finds without them."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[Try, dict[str, Any]]:
    """How each try ends; all of them are made by one process."""
    folder = tmp_path_factory.mktemp("sweep")
    asked, answered = folder / "tries.json", folder / "ends.json"
    asked.write_text(json.dumps([one.argv for one in TRIED]), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "tests.unit.tools.plan.sweep_worker",
        str(asked),
        str(answered),
    ]
    # Megatron sets variables of TE for the backend of attention, and refuses others than its own.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    environment = {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(answered.read_text(encoding="utf-8"))
    return dict(zip(TRIED, found, strict=True))


@pytest.mark.parametrize("one", TRIED, ids=str)
def test_an_option_ends_as_the_table_says(one: Try, ends: dict[Try, dict[str, Any]]) -> None:
    end = ends[one]
    assert [key for key in end if key != "rules"] == [one.end], end
    assert end["rules"] == ([one.rule] if one.rule else []), end
    if one.end == CAPTURED:
        assert end[CAPTURED] > 0


def test_what_reads_on_the_host_is_refused_by_name_and_nothing_else_for_that_reason() -> None:
    assert all(one.rule for one in TRIED if one.end == HOST_READ)
    assert {one.rule for one in TRIED if one.end == HOST_READ} == FINDABLE
    assert {one.end for one in TRIED if one.rule in FINDABLE} == {HOST_READ, REFUSED}


def test_every_option_that_configures_layers_is_known() -> None:
    tried = {word.partition("=")[0] for one in TRIED for word in (*one.argv, one.without)}
    known = tried | set(options_of(READ)) | set(options_of(OUTSIDE))
    unknown = [
        action.option_strings[0]
        for group in megatron_parser()._action_groups
        for action in group._group_actions
        if group.title in GROUPS and not known & set(action.option_strings)
    ]
    assert not unknown, f"unknown options, classify them in sweep_cases.py: {' '.join(unknown)}"


def test_every_choice_of_routers_dispatchers_and_attention_is_tried() -> None:
    words = {word for one in TRIED for word in one.argv}
    left = {"--attention-backend": {"auto", "local"}, "--moe-flex-dispatcher-backend": {"hybridep"}}
    left["--moe-flex-dispatcher-backend"].add("ncclep")
    left["--position-embedding-type"] = {"relative"}  # of T5
    for option in (
        "--moe-router-load-balancing-type",
        "--moe-token-dispatcher-type",
        "--moe-flex-dispatcher-backend",
        "--moe-router-score-function",
        "--moe-router-dtype",
        "--moe-token-drop-policy",
        "--normalization",
        "--attention-backend",
        "--position-embedding-type",
    ):
        action = megatron_parser()._option_string_actions[option]
        choices = {getattr(choice, "name", choice) for choice in action.choices or ()}
        defaults = {"probs", "softmax"}
        assert choices - words - left.get(option, set()) - defaults == set(), option


def test_the_tables_name_options_that_exist_and_each_once() -> None:
    options = [*options_of(READ), *options_of(OUTSIDE)]
    assert len(options) == len(set(options))
    assert set(options) <= set(megatron_parser()._option_string_actions)


def test_every_rule_about_layers_is_swept() -> None:
    swept = {one.rule for one in TRIED} | {
        word for reason in READ for word in reason.replace(";", " ").split()
    }
    assert {case.rule for case in LAYERS} <= swept
