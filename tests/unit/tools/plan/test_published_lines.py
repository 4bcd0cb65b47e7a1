"""Launch lines that people publish are planned right; formulas of memory against runs on GPUs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cg.tools.launch_line import read_line
from megatron_cg.tools.plan.memory import Memory, layers_of, memory_of
from megatron_cg.tools.plan.report import changes
from megatron_cg.tools.plan.settings import settings_of
from tests.unit.tools.plan.conftest import Plan, said


@dataclass(frozen=True)
class Published:
    line: str
    gpus: int
    billions: float
    scopes: str
    layers: int
    flags: str = ""
    dropped: str = ""
    memory: int = 79


FILE = Path(__file__).with_name("published_lines.yaml")
PUBLISHED = {
    name: Published(**fields) for name, fields in yaml.safe_load(FILE.read_text("utf-8")).items()
}
ALWAYS = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --fsdp-double-buffer "
    "--fsdp-db-use-persist-buf-on-alloc-fail --no-gradient-accumulation-fusion "
    "--no-create-attention-mask-in-dataloader --te-rng-tracker -m megatron_cg"
)


def words(line: str) -> set[str]:
    return {word for word in line.replace("'", " ").split() if word.startswith("-")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_line_is_planned_right_in_one_round(name: str, plan: Plan) -> None:
    expected = PUBLISHED[name]
    found = plan(expected.line, expected.memory)
    best = found.best
    assert found.accepted, said(found)
    assert found.gpus.count == expected.gpus
    assert best.memory is not None
    whole, _, sharded = best.memory.parameters
    assert whole == pytest.approx(expected.billions * 1e9, rel=0.005)
    assert sharded == pytest.approx(whole / expected.gpus, rel=0.02)
    makes_masks = "attention-mask-in" not in expected.line
    assert ("each replay would copy one" in said(found)) is makes_masks
    assert " ".join(best.settings.run.cuda_graph_modules) == expected.scopes
    assert ("has not learned to balance" in said(found)) is ("rows" in expected.flags)
    assert ("Blackwell GPUs were not measured" in said(found)) is (expected.memory == 190)
    assert sum(bool(layer.captured) for layer in best.layers) == expected.layers
    line = str(best.line)
    assert words(f"{ALWAYS} {expected.flags}") <= words(line)
    assert not words(expected.dropped) & words(line)
    assert all(change.reason for change in changes(found))
    again = plan(line, expected.memory)
    assert again.accepted and changes(again) == []
    assert (again.gpus, again.best.layers) == (found.gpus, best.layers)
    assert (str(again.best.line), again.best.memory) == (line, best.memory)


def test_hybrid_fsdp_shards_the_optimizers_state_over_all_ranks(plan: Plan) -> None:
    given = PUBLISHED["Llama 3 8B, FSDP, FP8"].line + " --num-distributed-optimizer-instances 4"
    lines = (given, f"{given} --outer-dp-sharding-strategy optim")
    by_group, by_all = (plan(line, 149).best.memory for line in lines)
    assert by_group is not None and by_all is not None and by_group.parameters == by_all.parameters
    more, less = by_group.terms["in every phase"], by_all.terms["in every phase"]
    assert more["optimizer state"] == pytest.approx(4 * less["optimizer state"])
    assert more["weights"] == less["weights"] and more["gradients"] == less["gradients"]


def test_a_graph_saves_what_eager_passes_recompute(plan: Plan) -> None:
    def saved(flags: str) -> tuple[int, int]:
        found = plan(f"{PUBLISHED['Llama 3 8B, FSDP, FP8'].line} {flags}", 9999)
        assert found.best.memory is not None and found.eager is not None
        eager = found.eager.terms["forward and backward passes"]["eager activations"]
        return found.best.memory.terms["graphs' pool"]["saved activations"], eager

    unfused, recomputed = "--attention-backend unfused", "--recompute-activations"
    of_fused, of_unfused, of_both = map(saved, ("", unfused, f"{unfused} {recomputed}"))
    probabilities = 32 * 32 * 8192**2 * 2  # layers, heads
    assert of_unfused == tuple(size + probabilities for size in of_fused)
    assert of_both == (of_unfused[0], of_fused[1])


@pytest.mark.parametrize("flags", ["", "--fp8-format hybrid"])
def test_recomputed_layers_of_experts_save_no_shared_expert(flags: str) -> None:
    line = f"{PUBLISHED['DeepSeek-V3, FSDP, HybridEP'].line} {flags}"
    settings = settings_of(read_line([line]), 1024)
    parts = {part.name: part for part in layers_of(settings)[-1].parts}
    assert settings.run.recomputes("moe")
    assert parts["shared expert"].saved == 0 < parts["attention"].saved
    # The checkpoint of Transformer Engine, which FP8 has, recomputes in a graph, too.
    assert all(
        (parts[name].recomputed == 0) is bool(flags) for name in ("shared expert", "experts")
    )


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


def allocated(memory: Memory) -> int:
    """The peak of ``torch.cuda.max_memory_allocated``, which does not count a pool's blocks."""
    always, _, passes, step, _ = (sum(terms.values()) for terms in memory.terms.values())
    return always + max(step, passes)


RUNS = recorded()
assert len(RUNS) > 10


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_within_a_tenth_of_a_recorded_run(name: str) -> None:
    run = RUNS[name]
    memory = run["ranks"][0]["timed"]["memory"]
    settings = settings_of(read_line(run["command"]), run["key"]["nproc"])
    assert "megatron" not in {violation.rule for violation in settings.broken}
    planned = memory_of(settings)
    assert allocated(planned) == pytest.approx(memory["peak_allocated"], rel=0.03)
    assert planned.reserved == pytest.approx(memory["peak_reserved"], rel=0.1)
    assert planned.total == pytest.approx(memory["device_in_use"], rel=0.1)


@pytest.mark.parametrize("captured", recorded_in_fp8())
def test_memory_in_fp8_is_that_of_a_recorded_run(captured: str) -> None:
    run = recorded_in_fp8()[captured]
    planned = memory_of(settings_of(read_line(run["command"]), 2))
    assert allocated(planned) / 2**20 == pytest.approx(run["allocated_mib"], rel=0.01)
    assert planned.reserved / 2**20 == pytest.approx(run["reserved_mib"], rel=0.1)
