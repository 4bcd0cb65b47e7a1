"""``megatron-cg doctor`` on the machine that the tests run on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from megatron_cg.tools.cli.main import main
from megatron_cg.upstream.symbols import installed_version
from tests.unit.tools.doctor.systems import ROOT


def command(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_cg.tools.cli.main", "doctor", *words],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs() -> tuple[tuple[int, dict[str, Any]], tuple[int, str]]:
    """Exit codes of both backends, the JSON of the one and the text of the other."""
    # The variable breaks a rule, so that graphs cannot run on any machine.
    # A third of the time that Megatron's import takes is that of torch's compiler.
    quick = {"TORCHDYNAMO_DISABLE": "1"}
    processes = [
        command("--json", CUDA_DEVICE_MAX_CONNECTIONS="1", **quick),
        command("--backend", "tape", COLUMNS="200", **quick),
    ]
    (data, _), (text, _) = (process.communicate() for process in processes)
    return (processes[0].returncode, json.loads(data)), (processes[1].returncode, text)


def texts(data: dict[str, Any], level: str) -> list[str]:
    return [f["found"] for f in data["findings"] if f["level"] == level]


def test_what_prevents_graphs_here_is_found_and_is_the_exit_code(runs: Any) -> None:
    code, data = runs[0]
    assert code == 1 and data["can_run"] is False
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in texts(data, "error")
    missing = installed_version("transformer-engine") is None
    assert ("transformer-engine is not installed" in texts(data, "error")) is missing


def test_what_is_here_is_seen_as_it_is(runs: Any) -> None:
    data = runs[0][1]
    levels = {(f["check"], f["level"]) for f in data["findings"]}
    assert levels >= {(name, "ok") for name in ("torch", "symbols", "flags", "megatron")}
    assert ("symbols", "error") not in levels
    assert f"torch {installed_version('torch')}" in texts(data, "ok")
    assert not [f for f in data["findings"] if "check itself failed" in f["found"]]


def test_changes_and_the_machine_come_from_the_code_that_makes_and_collects_them(
    runs: Any,
) -> None:
    data, text = runs[0][1], runs[1][1]
    rows = {(row["package"], row["place"], row["when"]): row["by"] for row in data["changes"]}
    ours = "megatron_cg.integrations.megatron"
    validate = ("megatron", "megatron.training.arguments.validate_args", "enabled")
    helper = ("megatron", "megatron.training.training.TECudaGraphHelper", "enabled")
    assert rows[validate] == rows[helper] == f"{ours}.patches"
    gathers = [
        by
        for (_, place, when), by in rows.items()
        if place.endswith("AllGatherPipeline.all_gather_params") and when == "graphs live"
    ]
    assert set(gathers) == {"megatron_cg.fastpath.params.gather"}
    assert {package for package, _, _ in rows} <= {
        "megatron",
        "megatron_fsdp",
        "torch",
        "transformer_engine",
    }
    assert all(by.startswith("megatron_cg.") for by in rows.values())
    assert "megatron_cg.compiled.together" not in rows.values()
    assert f"{ours}.patches  megatron: arguments.add_megatron_arguments, " in text
    assert data["system"]["torch_version"].startswith(installed_version("torch") or "?")
    assert data["system"]["os"] in texts(data, "ok")[-2] + texts(data, "ok")[-1]


def test_the_tape_can_run_here(runs: Any) -> None:
    code, text = runs[1]
    assert code == 0 and "the comparison on the CPU tape can run here" in text
    assert "driver" not in text and "transformer-engine" not in text
    counted = re.search(r"(\d+) symbols that \d+ modules rely on are as expected", text)
    assert counted is not None and int(counted[1]) > 40


def test_what_follows_the_dashes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--", "--bf16"]) == 2
    assert "--bf16" in capsys.readouterr().err
