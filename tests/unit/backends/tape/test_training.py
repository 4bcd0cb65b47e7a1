"""Two processes, the real GPTModel under the real Megatron-FSDP: eager runs and taped ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cg.telemetry.read_record import read_run
from megatron_cg.tools.align.compare import Comparison, compare
from megatron_cg.tools.cpu.launch import run_plans
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

STEPS, WARMUP, LAYERS = 6, 3, 2
DENSE = TrainingPlan(CpuModelConfig(layers=LAYERS, dropout=0.1), STEPS, WARMUP, microbatches=2)
PLANS = {
    "attn": DENSE,
    "attn mlp": replace(DENSE, model=replace(DENSE.model, graph_modules=("attn", "mlp"))),
    "whole layer": replace(DENSE, model=replace(DENSE.model, graph_modules=())),
    "fp32": replace(DENSE, model=replace(DENSE.model, bf16=False), microbatches=1),
    "moe": replace(
        DENSE, model=replace(DENSE.model, experts=4, graph_modules=("attn", "moe_router"))
    ),
    "router": replace(DENSE, model=replace(DENSE.model, experts=4, graph_modules=("moe_router",))),
}
SHARED = replace(DENSE, model=CpuModelConfig(layers=1, bf16=False), steps=4, microbatches=1)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All plans, each eagerly and with graphs."""
    root = tmp_path_factory.mktemp("training")
    jobs = []
    for name, plan in PLANS.items():
        jobs += [
            (plan, root / name / "eager"),
            (replace(plan, graphs=True), root / name / "graphs"),
        ]
    run_plans([*jobs, (SHARED, root / "shared")])
    return root


def verdict(first: Path, second: Path) -> Comparison:
    return compare(read_run(first), read_run(second))


@pytest.mark.parametrize("name", PLANS)
def test_graphs_train_bit_for_bit_as_eager(records: Path, name: str) -> None:
    result = verdict(records / name / "eager", records / name / "graphs")
    assert result.status == "identical", result.reason
    replays = 2 * LAYERS * (STEPS - WARMUP) * PLANS[name].microbatches
    assert result.graphs["captured"] == 2 * LAYERS
    assert result.graphs["replayed"] == replays and result.graphs["eager"] == 0
    assert len(result.values) == 2 * 2 * STEPS and result.shards > 40


def test_the_number_of_processes_does_not_matter_but_for_rounding(
    records: Path, tmp_path: Path
) -> None:
    """The collectives that the fakes lead to gloo sum what they should."""
    alone = replace(SHARED, micro_batch_size=2 * SHARED.micro_batch_size)
    run_plans([(alone, tmp_path)], processes=1)
    pair = [read_run(path)[0]["steps"] for path in (records / "shared", tmp_path)]
    assert len(pair[0]) == SHARED.steps
    for left, right in zip(*pair, strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
        loss, other = left["losses"]["lm loss"], right["losses"]["lm loss"]
        assert loss == pytest.approx(other, rel=1e-6)
