"""A capture before the first step, of layers whose routers have an auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

import megatron_cg
from tests.unit.counted import expect
from tests.unit.one_mask import OneMask

LENGTH, BATCH, LAYERS = 16, 2, 2


@pytest.fixture
def trainer(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_cg.integrations.megatron.own_loops import LoopHelper
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(LoopHelper, "make_backend", OneMask)
    calculator.init_num_microbatches_calculator(0, None, BATCH, BATCH, 1)
    scopes = ("attn", "moe_router")
    model = CpuModelConfig(layers=LAYERS, experts=4, graph_modules=scopes, sequence_length=LENGTH)
    megatron_cg.enable()
    yield Trainer(TrainingPlan(model=model, micro_batch_size=BATCH))
    megatron_cg.disable()
    calculator.destroy_num_microbatches_calculator()


def test_a_schedule_can_set_the_scale_of_a_captured_loss(trainer: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    helper: Any = TECudaGraphHelper(
        model=[trainer.model],
        config=trainer.model.config,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        optimizers=[trainer._optimizer],
    )
    helper.create_cudagraphs()
    made = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / 2)
    assert made is MoEAuxLossAutoScaler.main_loss_backward_scale and float(made) == 0.5
    trainer.step()
    expect(helper.session.counters, captured=LAYERS, replayed=LAYERS, mismatched=0)
