"""Graphs that one rank has lost are given up by all ranks, which train on as an eager run."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.unit.ranks import on_ranks

LAYERS, BEFORE, AFTER = 2, 3, 6


def train(*, graphs: bool) -> dict[str, Any]:
    """Rank 1 deletes its graphs by itself after the first replayed step."""
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
    from megatron_cg.tools.cpu.voting import VotingTrainer

    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"), dropout=0.1)
    trainer: Any = VotingTrainer(TrainingPlan(model, graphs=True))
    try:
        numbers = [trainer.step() for _ in range(BEFORE)]
        if graphs:
            trainer.start()
        numbers.append(trainer.step())
        if dist.get_rank() == 1:
            trainer.stop()
        numbers += [trainer.step() for _ in range(AFTER)]
        replayed, left = trainer.report()["replayed"], trainer.session is not None
        return {"numbers": numbers, "replayed": replayed, "left": left}
    finally:
        trainer.close()
        parallel_state.destroy_model_parallel()


def play() -> list[dict[str, Any]]:
    return [train(graphs=graphs) for graphs in (False, True)]


def test_graphs_that_one_rank_deletes_are_given_up_by_all() -> None:
    ranks = on_ranks(play)
    for eager, graphed in ranks:
        assert graphed["numbers"] == eager["numbers"]
        assert graphed["left"] is False
    # Lost after one step, voted on after the next, given up before the one after that.
    assert [graphed["replayed"] for _, graphed in ranks] == [LAYERS * 3, LAYERS]
