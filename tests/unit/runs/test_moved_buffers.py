"""Megatron-FSDP's own buffers moved under real graphs, in two processes, on one rank or on both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.functional.tampering.replay import (
    buffers_moved,
    buffers_moved_in_backward,
    parameter_replaced,
)
from tests.unit.ranks import on_ranks
from tests.unit.trainers import new_trainer

pytestmark = pytest.mark.fault
BEFORE, AFTER, LAYERS = 2, 2, 3
BOTH = (0, 1)
Change = Callable[[Any], None]


def play() -> dict[str, Any]:
    """In one process: an eager run, and one with graphs for each policy and place."""
    from megatron.core import parallel_state

    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"), dropout=0.1)

    def run(policy: str | None, change: Change | None = None, ranks: tuple[int, ...] = BOTH) -> Any:
        trainer = new_trainer(model, graphs=True)
        numbers, error = [], ""
        try:
            numbers += [trainer.step() for _ in range(BEFORE)]
            if policy is not None:
                given: Any = policy
                trainer.capture(TapeBackend(), Agreement(), policy=ReplayPolicy(given))
            if change is not None and dist.get_rank() in ranks:
                change(trainer.model)
            numbers += [trainer.step() for _ in range(AFTER)]
        except ReplayMismatchError as found:
            error = str(found)
        report = trainer.session.counters.as_dict() if trainer.session is not None else {}
        trainer.close()
        parallel_state.destroy_model_parallel()
        return {"numbers": numbers, "error": error, "graphs": report}

    return {
        "nothing": run(None),
        # On one rank alone an eager run would hang too: the gradient that Megatron-FSDP waits for
        # never comes there, so ranks reduce in another order.
        "other parameter eagerly": run(None, parameter_replaced),
        "untouched": run("eager"),
        "eager": run("eager", buffers_moved, ranks=(1,)),
        "other parameter": run("eager", parameter_replaced),
        "error": run("error", buffers_moved),
        "backward": run("eager", buffers_moved_in_backward),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(play)


def test_nothing_moves_by_itself(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["untouched"]["numbers"] == rank["nothing"]["numbers"]
        assert rank["untouched"]["graphs"]["replayed"] == LAYERS * AFTER
        assert rank["untouched"]["graphs"]["mismatched"] == 0


def test_a_rank_whose_buffers_moved_goes_on_eagerly(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["eager"]["numbers"] == rank["nothing"]["numbers"]
    assert ranks[0]["eager"]["graphs"]["replayed"] == LAYERS * AFTER
    assert ranks[1]["eager"]["graphs"]["replayed"] == 0
    assert ranks[1]["eager"]["graphs"]["mismatched"] == LAYERS * AFTER


def test_a_replaced_parameter_is_used_at_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["other parameter"]["numbers"] == rank["other parameter eagerly"]["numbers"]
        assert rank["other parameter"]["numbers"] != rank["nothing"]["numbers"]
        assert rank["other parameter"]["graphs"]["mismatched"] == AFTER


def test_with_the_policy_error_the_run_ends_with_unit_and_cause(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        text = rank["error"]["error"]
        assert "layer 0" in text and "The FSDP buffer of unit" in text, text
        assert "(--cg-on-mismatch error)" in text
        assert len(rank["error"]["numbers"]) == BEFORE


def test_a_buffer_that_moves_between_forward_and_backward_ends_the_run(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        text = rank["backward"]["error"]
        assert "in the backward pass" in text and "cannot run eagerly" in text, text
