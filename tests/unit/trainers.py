"""A trainer on the CPU, for as long as a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan


@contextmanager
def half_a_batch(trainer: Any, is_short: bool = True) -> Iterator[None]:
    """Batches of one sequence, which no graph takes; those of the trainer if not ``is_short``."""
    batches = trainer._batches
    if is_short:
        trainer._batches = ((tokens[:1], labels[:1]) for tokens, labels in batches)
    yield
    trainer._batches = batches


@contextmanager
def trainer_of(model: CpuModelConfig, **plan: Any) -> Iterator[Any]:
    """A trainer of ``model``, whose last graphs and process groups are gone after the block.

    ``plan`` has other fields of ``TrainingPlan``.
    """
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer

    try:
        with closing(Trainer(TrainingPlan(model, **plan))) as trainer:
            yield trainer
    finally:
        parallel_state.destroy_model_parallel()
