"""A router's token counts, by which Megatron balances experts, include only training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from tests.unit.counted import expect

EXPERTS, TOPK, BEFORE, AFTER, LAYERS = 4, 2, 2, 3, 2


@pytest.fixture
def train(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trains an MoE model balanced by a bias; returns numbers and counts for each step."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_cg.tools.cpu import cpu_model as model
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    balanced = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    monkeypatch.setattr(model, "TransformerConfig", partial(TransformerConfig, **balanced))
    scopes = ("attn", "moe_router")
    config = CpuModelConfig(layers=LAYERS, experts=EXPERTS, topk=TOPK, graph_modules=scopes)

    def run(*, graphs: bool, policy: ReplayPolicy | None = None) -> tuple[list[Any], Any]:
        parallel_state.destroy_model_parallel()
        trainer: Any = Trainer(TrainingPlan(config))
        routers = [m for m in trainer.model.modules() if isinstance(m, TopKRouter)]
        assert len(routers) == LAYERS
        found = []
        for number in range(BEFORE + AFTER):
            if graphs and number == BEFORE:
                trainer.capture(TapeBackend(), policy=policy)
            counts = [router.local_tokens_per_expert.tolist() for router in routers]
            found.append((counts, trainer.step()))
        counters = None
        if trainer.session is not None:
            counters = trainer.session.counters
            trainer.session.close()
        shape = trainer.plan
        tokens = shape.micro_batch_size * shape.model.sequence_length * (BEFORE + AFTER)
        last = torch.stack([router.local_tokens_per_expert for router in routers])
        assert last.sum(1).tolist() == [TOPK * tokens] * LAYERS
        return [*found, last.tolist()], counters

    yield run


def test_what_warmup_and_capture_count_is_taken_back(train: Any) -> None:
    eager, _ = train(graphs=False)
    graphed, counters = train(graphs=True)
    assert graphed == eager
    expect(counters, captured=LAYERS, replayed=LAYERS * AFTER, eager=0)


def test_what_a_verification_counts_is_taken_back(train: Any) -> None:
    eager, _ = train(graphs=False)
    verified, counters = train(graphs=True, policy=ReplayPolicy(verify_interval=1))
    assert verified == eager
    expect(counters, replayed=LAYERS * AFTER, verified=LAYERS * AFTER, mismatched=0)
