"""ZeRO-1, ZeRO-2 and no shards: no FSDP units.

In the first two every module inside a graph has an unshard hook of its own, in the third none.

The eager run has no double buffers, as a user's has: Megatron-FSDP then prefetches further ahead,
and at the end of a run other ranks' parts of the weights are newer. Only what a rank owns counts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.telemetry.read_record import read_run
from megatron_cg.tools.align.compare import compare
from megatron_cg.tools.cpu.launch import run_processes

STRATEGIES = ("optim", "optim_grads", "no_shard")


def train_all(root: Path) -> None:
    from megatron_cg.tools.cpu.train import Trainer, train
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    step = Trainer.step

    def step_and_gather(self: Any) -> tuple[float, float]:
        """A step that ends as Megatron's optimizer ends it, with the next all-gather begun."""
        result = step(self)
        self._fsdp.start_param_sync()
        for event, _ in self._fsdp.all_gather_pipeline.param_gather_event_map.values():
            event.wait()
        return result

    Trainer.step = step_and_gather  # type: ignore[method-assign]
    for strategy in STRATEGIES:
        options = {"data_parallel_sharding_strategy": strategy, "bucket_size": 4000}
        moving = {"fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False}
        model = CpuModelConfig(
            layers=3, experts=4, graph_modules=("attn", "moe_router"), fsdp_options=options
        )
        eager = replace(model, fsdp_options={**options, **moving})
        train(TrainingPlan(model=eager), root / strategy / "eager")
        train(TrainingPlan(model=model, graphs=True), root / strategy / "graphs")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zero")
    run_processes(partial(train_all, root))
    return root


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_train_bit_for_bit_as_eager(records: Path, strategy: str) -> None:
    eager, graphs = (read_run(records / strategy / name) for name in ("eager", "graphs"))
    result = compare(eager, graphs)
    assert result.status == "identical", result.reason
    counts = {name: result.graphs[name] for name in ("captured", "replayed", "eager")}
    assert counts == {"captured": 6, "replayed": 18, "eager": 0}
    kinds = {name.split(":")[0] for name in eager[0]["parameters"]}
    assert kinds == ({"main"} if strategy == "no_shard" else {"main", "model"})
