"""Passes of another shape between replays: an evaluation, a generation, a short microbatch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.telemetry.record_shards import parameter_digests
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.unit.counted import expect

LAYERS, LONG, SHORT, STEPS, WARMUP = 2, 16, 8, 4, 2
SCOPES = {
    "dense": ("attn", "mlp"),
    "router": ("attn", "moe_router"),
    "preprocess": ("attn", "moe_router", "moe_preprocess"),
}


def losses(trainer: Any, length: int, batch: int) -> torch.Tensor:
    """The losses of a microbatch of the trainer's own, in another form."""
    batches = trainer._batches
    with patch.multiple(batches, _sequence=length, _batch=batch):
        found: torch.Tensor = trainer._forward()
    return found


def short_microbatch(trainer: Any) -> list[torch.Tensor]:
    with trainer._fsdp.no_sync():
        found = losses(trainer, SHORT, 2)
        found.sum().backward()
    return [found.detach()]


def evaluation(trainer: Any) -> list[torch.Tensor]:
    trainer.model.eval()
    with torch.no_grad():
        found = losses(trainer, LONG, 4)
    trainer.model.train()
    return [found]


Pass = Callable[[Any], list[torch.Tensor]]


def trained(scopes: str, another: Pass, *, graphs: bool) -> tuple[list[torch.Tensor], Any]:
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer

    experts = 0 if scopes == "dense" else 4
    model = CpuModelConfig(layers=LAYERS, experts=experts, graph_modules=SCOPES[scopes])
    trainer: Any = Trainer(TrainingPlan(model, graphs=graphs))
    found: list[torch.Tensor] = []
    try:
        for step in range(STEPS):
            if graphs and step == WARMUP:
                trainer.capture(TapeBackend())
            for number in range(2):
                with nullcontext() if number else trainer._fsdp.no_sync():
                    loss = trainer._forward()
                    loss.sum().backward()
                    found.append(loss.detach())
                if not number:
                    found += another(trainer)
            trainer._fsdp.finish_grad_sync()
            trainer._optimizer.step(sync_grad_before_optimizer_step=False)
            trainer._optimizer.zero_grad()
        if graphs:
            replays = (STEPS - WARMUP) * LAYERS
            expect(trainer.session.counters, replayed=2 * replays, eager=replays)
    finally:
        if trainer.session is not None:
            trainer.session.close()
    digests = parameter_digests(trainer.model)
    parallel_state.destroy_model_parallel()
    return found, digests


@pytest.mark.parametrize("another", [short_microbatch, evaluation])
@pytest.mark.parametrize("scopes", SCOPES)
def test_replays_after_another_shape_are_as_before(
    one_rank: None, scopes: str, another: Pass
) -> None:
    eager, weights = trained(scopes, another, graphs=False)
    replayed, same = trained(scopes, another, graphs=True)
    assert len(eager) == len(replayed) and all(map(torch.equal, eager, replayed))
    assert weights == same
