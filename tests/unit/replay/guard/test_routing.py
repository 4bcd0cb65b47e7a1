"""Routers that record their choice of experts do so in eager passes; other passes are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

LAYERS, BEFORE, AFTER = 2, 2, 2
Recorded = list[torch.Tensor]


def train(*, graphed: bool, recording_at_capture: bool = False) -> tuple[Any, Recorded, Any]:
    """Numbers of all steps; choices recorded in one step after the capture; the counters."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    shape = CpuModelConfig(
        layers=LAYERS,
        graph_modules=("attn", "moe_router"),
        experts=4,
        bf16=False,
        options={"moe_enable_routing_replay": True},
    )
    with trainer_of(shape, graphs=graphed) as trainer:
        numbers = [trainer.step()]
        if recording_at_capture:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        if graphed:
            trainer.capture(TapeBackend())
        RouterReplay.clear_global_router_replay_action()
        numbers += [trainer.step() for _ in range(BEFORE)]
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        numbers.append(trainer.step())
        recorded = [choice.clone() for choice in RouterReplay.get_recorded_data()]
        RouterReplay.clear_global_router_replay_action()
        numbers += [trainer.step() for _ in range(AFTER)]
        return numbers, recorded, trainer.session and trainer.session.counters


def test_what_a_router_records_is_as_in_an_eager_run(one_rank: None) -> None:
    numbers, wanted, _ = train(graphed=False)
    found, recorded, counters = train(graphed=True)
    assert found == numbers
    assert len(recorded) == LAYERS and all(map(torch.equal, recorded, wanted))
    expect(counters, replayed=LAYERS * (BEFORE + AFTER), mismatched=LAYERS, eager=LAYERS)


def test_a_graph_that_was_captured_from_a_router_with_an_action_is_never_replayed(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    numbers, _, _ = train(graphed=False)
    found, _, counters = train(graphed=True, recording_at_capture=True)
    assert found == numbers
    passes = LAYERS * (BEFORE + 1 + AFTER)
    expect(counters, replayed=0, mismatched=passes, eager=passes)
    assert "the router's action was RECORD at capture and is none now (routing)" in caplog.text
