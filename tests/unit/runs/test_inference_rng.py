"""Dropout under ``--inference-rng-tracker``, whose forks do nothing: one generator draws all."""

from __future__ import annotations

from typing import Any

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import half_a_batch, trainer_of

LAYERS, BEFORE, AFTER = 2, 1, 3


def train(*, graphed: bool, short: int | None = None) -> tuple[Any, Any]:
    """Losses and norms of all steps, one with half a batch, and the counters of the graphs."""
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
            numbers = []
            for step in range(BEFORE + AFTER):
                if graphed and step == BEFORE:
                    trainer.capture(TapeBackend(), policy=ReplayPolicy("eager"))
                with half_a_batch(trainer, step == short):
                    numbers.append(trainer.step())
            return numbers, trainer.session and trainer.session.counters
    finally:
        random.initialize_rng_tracker(force_reset=True)


def test_replays_draw_what_eager_passes_draw(one_rank: None) -> None:
    eager, _ = train(graphed=False)
    graphed, counters = train(graphed=True)
    assert graphed == eager and len(set(eager)) == BEFORE + AFTER
    expect(counters, replayed=LAYERS * AFTER, mismatched=0, eager=0)


def test_an_eager_step_between_replays_draws_from_the_same_generator(one_rank: None) -> None:
    eager, _ = train(graphed=False, short=BEFORE + 1)
    graphed, counters = train(graphed=True, short=BEFORE + 1)
    assert graphed == eager and len(set(eager)) == BEFORE + AFTER
    expect(counters, replayed=LAYERS * (AFTER - 1), mismatched=LAYERS, eager=LAYERS)
