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
