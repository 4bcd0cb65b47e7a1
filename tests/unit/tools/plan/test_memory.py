"""Formulas of memory against runs on GPUs: benchmarks/results, with their own command lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.launch_line import read_line
from megatron_cg.tools.plan.memory import memory_of
from megatron_cg.tools.plan.settings import settings_of

RESULTS = Path(__file__).parents[4] / "benchmarks/results"


def recorded() -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(RESULTS.glob("*/bench.json")):
        for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
            key = run["key"]
            if run["status"] == "ok" and key["contender"].startswith("fsdp"):
                found[f"{file.parent.name} {key['shape']} {key['contender']}"] = run
    return found


def recorded_in_fp8() -> dict[str, dict[str, Any]]:
    lines = (RESULTS / "whole-layers-2xH100.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line)["run"] for line in lines]
    return {run["captured"]: run for run in runs if "--fp8-format" in run["command"]}


RUNS = recorded()
assert len(RUNS) > 10


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_within_a_tenth_of_a_recorded_run(name: str) -> None:
    run = RUNS[name]
    memory = run["ranks"][0]["timed"]["memory"]
    settings = settings_of(read_line(run["command"]), run["key"]["nproc"])
    assert "megatron" not in {violation.rule for violation in settings.broken}
    planned = memory_of(settings)
    assert planned.allocated == pytest.approx(memory["peak_allocated"], rel=0.03)
    assert planned.reserved == pytest.approx(memory["peak_reserved"], rel=0.1)
    assert planned.total == pytest.approx(memory["device_in_use"], rel=0.1)


@pytest.mark.parametrize("captured", recorded_in_fp8())
def test_memory_in_fp8_is_that_of_a_recorded_run(captured: str) -> None:
    run = recorded_in_fp8()[captured]
    planned = memory_of(settings_of(read_line(run["command"]), 2))
    assert planned.allocated / 2**20 == pytest.approx(run["allocated_mib"], rel=0.01)
    assert planned.reserved / 2**20 == pytest.approx(run["reserved_mib"], rel=0.1)
