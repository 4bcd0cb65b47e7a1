"""``megatron-cg doctor`` on the machine that the tests run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_cg.upstream.symbols import installed_version
from tests.unit.tools.doctor.systems import ROOT

GATHER = "AllGatherPipeline.all_gather_params"


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
        command("--json", "--verbose", CUDA_DEVICE_MAX_CONNECTIONS="1", **quick),
        command("--backend", "tape", **quick),
    ]
    (data, _), (text, _) = (process.communicate() for process in processes)
    return (processes[0].returncode, json.loads(data)), (processes[1].returncode, text)


def texts(data: dict[str, Any], level: str) -> list[str]:
    return [f["found"] for f in data["findings"] if f["level"] == level]


def test_what_prevents_graphs_here_is_found_and_is_the_exit_code(runs: Any) -> None:
    code, data = runs[0]
    assert code == 1 and data["can_run"] is False and data["format"] == 1
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in texts(data, "error")
    missing = installed_version("transformer-engine") is None
    assert ("transformer-engine is not installed" in texts(data, "error")) is missing
    assert data["counts"]["error"] == len(texts(data, "error"))


def test_what_is_here_is_seen_as_it_is(runs: Any) -> None:
    data = runs[0][1]
    levels = {(f["check"], f["level"]) for f in data["findings"]}
    assert levels >= {(name, "ok") for name in ("versions", "libraries", "symbols")}
    assert levels.isdisjoint({(name, "error") for name in ("symbols", "settings", "torch")})
    assert f"torch {installed_version('torch')}" in texts(data, "ok")


def test_symbols_of_other_packages_are_named_on_request(runs: Any) -> None:
    data, text = runs[0][1], runs[1][1]
    gathers = [row for row in data["symbols"] if row["symbol"].endswith(GATHER)]
    assert gathers and all(row["replaced"] and row["error"] is None for row in gathers)
    assert {row["module"] for row in gathers} == {"megatron_cg.fastpath.gather"}
    assert GATHER not in text


def test_the_tape_can_run_here(runs: Any) -> None:
    code, text = runs[1]
    first, *facts = filter(None, text.splitlines())
    assert code == 0 and first == "the comparison on the CPU tape can run here"
    assert [line.split()[0] for line in facts] == ["versions", "symbols"]
