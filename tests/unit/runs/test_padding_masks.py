"""A padding mask, which Megatron does not pass on to a graph that begins behind attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from tests.unit.counted import expect

LAYERS, TOKENS, BEFORE, AFTER = 2, 16, 2, 2


def train(*, graphed: bool, masked: bool) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs."""
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    shape = CpuModelConfig(
        layers=LAYERS,
        sequence_length=TOKENS,
        graph_modules=("moe_router",),
        experts=4,
        bf16=False,
        options={
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.5,
        },
    )
    trainer: Any = Trainer(TrainingPlan(shape, micro_batch_size=1, graphs=graphed))
    model, session = trainer.model, None
    padding = torch.arange(TOKENS)[None] >= TOKENS // 4 if masked else None

    def call(*given: Any, **named: Any) -> Any:
        return model(*given, **named, padding_mask=padding)

    def step() -> tuple[float, float]:
        trainer.model = call
        numbers: tuple[float, float] = trainer.step()
        trainer.model = model
        return numbers

    try:
        numbers = [step() for _ in range(BEFORE)]
        if graphed:
            session = trainer.capture(TapeBackend())
        numbers += [step() for _ in range(AFTER)]
        return numbers, session.counters if session is not None else None
    finally:
        if session is not None:
            session.close()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_with_a_padding_mask_runs_eagerly(one_rank: None, masked: bool) -> None:
    eager, _ = train(graphed=False, masked=masked)
    graphed, counters = train(graphed=True, masked=masked)
    assert graphed == eager
    passes = LAYERS * AFTER
    eagerly = passes if masked else 0
    expect(counters, replayed=passes - eagerly, mismatched=eagerly, eager=eagerly)
