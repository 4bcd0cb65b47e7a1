"""Trainers on the CPU, and their layers."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from typing import Any

import torch

from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan

UNPOOLED = {"fsdp_double_buffer": False, "fsdp_db_use_persist_buf_on_alloc_fail": False}
"""Megatron-FSDP's options for memory that it allocates at each gather."""


def new_trainer(model: CpuModelConfig | None = None, **plan: Any) -> Any:
    from megatron_cg.tape.train import Trainer

    return Trainer(TrainingPlan(model or CpuModelConfig(layers=1), **plan))


def layers_of(trainer: Any) -> list[Any]:
    from megatron_cg.tape.train import transformer_layers

    return list(transformer_layers(trainer.model))


def evaluate(trainer: Any) -> float:
    trainer.model.eval()
    with torch.no_grad():
        loss = float(trainer._forward().double().mean())
    trainer.model.train()
    return loss


def helper_of(
    trainer: Any, backend: Any, *layers: str, on_failure: Any = "error", size: int = 2
) -> Any:
    """Megatron's capture helper of a trainer, for batches of ``size`` sequences."""
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    from megatron_cg.arguments.schema import GraphArguments
    from megatron_cg.integrations.megatron.helper import FsdpHelper

    length = trainer.plan.model.sequence_length
    given = [trainer.model], trainer.model.config, length, size, [trainer._optimizer]
    settings = GraphArguments(cg_layers=layers, cg_on_failure=on_failure)
    return FsdpHelper(lambda: TECudaGraphHelper(*given), backend, settings)


@contextmanager
def microbatch_of(size: int) -> Iterator[None]:
    """Megatron's loops have one microbatch a step, of so many sequences."""
    from megatron.core import num_microbatches_calculator as calculator

    calculator.init_num_microbatches_calculator(0, None, size, size, 1)
    try:
        yield
    finally:
        calculator.destroy_num_microbatches_calculator()


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
    """As :func:`new_trainer`; its last graphs and process groups are gone after the block."""
    from megatron.core import parallel_state

    try:
        with closing(new_trainer(model, **plan)) as trainer:
            yield trainer
    finally:
        parallel_state.destroy_model_parallel()


def compared(
    act: Callable[[Any], list[Any]], shape: CpuModelConfig, backend: Any = None
) -> list[Any]:
    """Numbers of an eager run and of one with graphs, and the counters of these.

    ``act`` trains on after the first step and the capture, by the tape if no ``backend`` is given.
    """
    from megatron_cg.tape.tape_backend import TapeBackend

    runs, counts = [], {}
    for graphs in (False, True):
        # A run may change a list of its config.
        with trainer_of(deepcopy(shape), graphs=graphs) as trainer:
            numbers = [trainer.step()]
            if graphs:
                trainer.capture(backend or TapeBackend())
            runs.append([*numbers, *act(trainer)])
            if graphs:
                counts = trainer.session.counters.as_dict()
    return [*runs, counts]
