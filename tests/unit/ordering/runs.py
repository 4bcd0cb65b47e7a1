"""Runs of the real Megatron-FSDP whose order is checked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_cg.backends.tape import TapeBackend
from tests.unit.ordering.doubles.device import modelled_device
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.trace import Trace

LAYERS = 4
"""Twice as many units as there are double buffers."""


@dataclass(frozen=True)
class Run:
    """What is trained, and how; steps of ``microbatches`` passes."""

    graphs: bool = False
    fast: bool = True
    shape: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 2
    evaluates: bool = False


def traced(run: Run) -> Trace:
    """Train a few steps, and return the trace of the last ones.

    With graphs these are the steps after the capture, which itself is not traced.
    """
    from megatron.core import parallel_state

    from megatron_cg.cpu.plan import CpuModelConfig, TrainingPlan
    from megatron_cg.cpu.train import Trainer

    with ExitStack() as stack:
        stack.callback(parallel_state.destroy_model_parallel)
        notes = stack.enter_context(modelled_device())
        shape = CpuModelConfig(**{
            "layers": LAYERS, "hidden_size": 16, "ffn_hidden_size": 16, "sequence_length": 4,
            **run.shape,
        })  # fmt: skip
        trainer: Any = Trainer(TrainingPlan(shape, graphs=run.graphs, microbatches=run.microbatches))
        trainer.step()
        if run.graphs:
            trainer.step()
            session = trainer.capture(TapeBackend(), fast_path=run.fast)
            stack.callback(session.close)
        name_memory(notes, trainer)
        with notes.tracing():
            trainer.step()
            if run.evaluates:
                _evaluate(trainer)
            trainer.step()
            trainer.step()
        name_memory(notes, trainer)
        return notes.trace


def _evaluate(trainer: Any) -> None:
    trainer.model.eval()
    with torch.no_grad():
        trainer._forward()
    trainer.model.train()


def name_memory(notes: Notes, trainer: Any) -> None:
    """Say which storages are Megatron-FSDP's buffers."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

    for name, tensor in upstream.get_global_memory_buffer().buffer.items():
        notes.name(tensor, f"Megatron-FSDP's buffer {name}")
    for number, group in enumerate(trainer.model.module.param_and_grad_buffer.parameter_groups):
        for kind in ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer"):
            buffer = getattr(group, kind)
            if buffer is None:
                continue
            if buffer.data is not None:
                notes.name(buffer.data, f"the {kind} of bucket {number} (unit {group.fsdp_unit_id})")
            for key, bucket in getattr(buffer.temporary_bucket_allocator, "buckets", {}).items():
                notes.name(bucket.data, f"the unsharded {kind} of bucket {key}")
