"""A padding mask, which Megatron does not pass on to a graph that begins behind attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

LAYERS, TOKENS, BEFORE, AFTER = 2, 16, 2, 2


def train(*, graphed: bool, masked: bool) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs."""
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
    padding = torch.arange(TOKENS)[None] >= TOKENS // 4 if masked else None

    with trainer_of(shape, micro_batch_size=1, graphs=graphed) as trainer:
        model = trainer.model

        def step() -> tuple[float, float]:
            trainer.model = partial(model, padding_mask=padding)
            numbers: tuple[float, float] = trainer.step()
            trainer.model = model
            return numbers

        numbers = [step() for _ in range(BEFORE)]
        if graphed:
            trainer.capture(TapeBackend())
        numbers += [step() for _ in range(AFTER)]
        return numbers, trainer.session and trainer.session.counters


@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_with_a_padding_mask_runs_eagerly(one_rank: None, masked: bool) -> None:
    eager, _ = train(graphed=False, masked=masked)
    graphed, counters = train(graphed=True, masked=masked)
    assert graphed == eager
    passes = LAYERS * AFTER
    eagerly = passes if masked else 0
    expect(counters, replayed=passes - eagerly, mismatched=eagerly, eager=eagerly)
