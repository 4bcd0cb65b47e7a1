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


def test_training_has_the_numbers_of_eager_runs(ranks: list[dict[str, Any]]) -> None:
    """A rank whose buffers moved trains eagerly; a replaced parameter is used at once."""
    for number, rank in enumerate(ranks):
        nothing, other = rank["nothing"]["numbers"], rank["other parameter eagerly"]["numbers"]
        for name, numbers, mismatched in (
            ("untouched", nothing, 0),
            ("eager", nothing, number * LAYERS * AFTER),
            ("other parameter", other, AFTER),
        ):
            counts = rank[name]["graphs"]
            assert rank[name]["numbers"] == numbers and counts["mismatched"] == mismatched, name
            assert counts["replayed"] == LAYERS * AFTER - mismatched, name
        assert other != nothing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("error", ("layer 0", "The FSDP buffer of unit", "(--cg-on-mismatch error)")),
        ("backward", ("in the backward pass", "cannot run eagerly")),
    ],
)
def test_a_run_ends_with_unit_and_cause(
    ranks: list[dict[str, Any]], name: str, words: tuple[str, ...]
) -> None:
    for rank in ranks:
        assert all(word in rank[name]["error"] for word in words), rank[name]["error"]
        assert len(rank[name]["numbers"]) == BEFORE
