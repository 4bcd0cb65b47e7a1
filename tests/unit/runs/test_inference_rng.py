"""Dropout under ``--inference-rng-tracker``, whose forks do nothing: one generator draws all."""

from __future__ import annotations

from typing import Any

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

LAYERS, BEFORE, AFTER = 2, 1, 3


def train(*, graphed: bool) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs."""
    from megatron.core.tensor_parallel import random

    shape = CpuModelConfig(
        layers=LAYERS,
        graph_modules=("attn", "mlp"),
        dropout=0.1,
        options={"inference_rng_tracker": True},
    )
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        with trainer_of(shape, graphs=graphed) as trainer:
            assert random.get_cuda_rng_tracker().get_states() == {}
            numbers = [trainer.step() for _ in range(BEFORE)]
            if graphed:
                trainer.capture(TapeBackend())
            numbers += [trainer.step() for _ in range(AFTER)]
            return numbers, trainer.session and trainer.session.counters
    finally:
        random.initialize_rng_tracker(force_reset=True)


def test_replays_draw_what_eager_passes_draw(one_rank: None) -> None:
    eager, _ = train(graphed=False)
    graphed, counters = train(graphed=True)
    assert graphed == eager and len(set(eager)) == BEFORE + AFTER
    expect(counters, replayed=LAYERS * AFTER, mismatched=0, eager=0)
