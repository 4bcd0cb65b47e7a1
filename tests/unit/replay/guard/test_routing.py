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


@pytest.mark.parametrize("at_capture", [False, True])
def test_what_a_router_records_is_as_in_an_eager_run(
    at_capture: bool, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph that was captured from a router with an action is never replayed."""
    numbers, wanted, _ = train(graphed=False)
    found, recorded, counters = train(graphed=True, recording_at_capture=at_capture)
    assert found == numbers
    assert len(recorded) == LAYERS and all(map(torch.equal, recorded, wanted))
    replays = 0 if at_capture else LAYERS * (BEFORE + AFTER)
    passes = LAYERS * (BEFORE + 1 + AFTER)
    expect(counters, replayed=replays, mismatched=passes - replays, eager=passes - replays)
    text = "the router's action was RECORD at capture and is none now (routing)"
    assert (text in caplog.text) is at_capture
