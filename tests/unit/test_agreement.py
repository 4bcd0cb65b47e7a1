"""All ranks keep their graphs, or none does; and nobody waits for ever."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cg.agreement import Agreement
from megatron_cg.cpu.launch import run_processes
from megatron_cg.errors import CaptureError


def vote(root: Path, failing: int | None, absent: int | None) -> None:
    """In one process: confirm, fail or stay away; what came of it goes into a file."""
    rank = dist.get_rank()
    agreement = Agreement(timedelta(seconds=5))
    said = "kept"
    try:
        if rank == failing:
            agreement.report_failure()
            agreement.report_failure()
            said = "gave up"
        elif rank != absent:
            agreement.confirm()
    except CaptureError as error:
        said = str(error)
    (root / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()


def outcome(root: Path, *, failing: int | None = None, absent: int | None = None) -> list[str]:
    run_processes(partial(vote, root, failing, absent))
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_keep_what_all_have(tmp_path: Path) -> None:
    assert outcome(tmp_path) == ["kept", "kept"]


def test_one_failure_makes_all_give_up(tmp_path: Path) -> None:
    first, second = outcome(tmp_path, failing=1)
    assert second == "gave up"
    assert first.startswith("capture failed on rank 1, whose own log has the reason")


def test_a_rank_that_fails_alone_does_not_go_on(tmp_path: Path) -> None:
    _, second = outcome(tmp_path, failing=1, absent=0)
    assert "the other ranks did not come to agree on it" in second
    assert "--cuda-graph-impl none" in second


@pytest.mark.parametrize("failing", [0, 1])
def test_a_capture_whose_last_step_fails_on_one_rank_leaves_all_eager(
    failing: int, tmp_path: Path
) -> None:
    from megatron_cg.align.compare import compare, read_run

    run_processes(partial(train_with_one_failure, tmp_path, failing))
    result = compare(read_run(tmp_path / "eager"), read_run(tmp_path / "graphs"))
    assert all(value.same for value in result.values) and len(result.values) == 2 * 2 * 4
    assert not result.different_shards and result.shards > 0
    assert result.reason == "the graph run captured no graph, so two eager runs would be compared"


def train_with_one_failure(root: Path, failing: int) -> None:
    """Train eagerly; then again, with a capture whose publishing fails on one rank."""
    from unittest.mock import patch

    from megatron_cg import session
    from megatron_cg.backends.tape import TapeBackend
    from megatron_cg.cpu.model import CpuModelConfig
    from megatron_cg.cpu.train import Trainer, TrainingPlan, train
    from megatron_cg.replay import attach_replay

    plan = TrainingPlan(model=CpuModelConfig(layers=2, graph_modules=("attn",)), steps=4)
    train(plan, root / "eager")
    agreement = Agreement(timedelta(seconds=20))
    capture = Trainer.capture

    def attach_or_fail(*args: Any) -> Any:
        if dist.get_rank() == failing:
            raise RuntimeError("forced on one rank")
        return attach_replay(*args)

    class Tried(session.Session):
        def __init__(self, model: Any, units: Any, backend: Any) -> None:
            super().__init__(model, units, backend, agreement.confirm)

    def captured_by_all_or_none(self: Trainer, backend: TapeBackend) -> session.Session:
        try:
            return capture(self, backend)
        except RuntimeError:
            agreement.report_failure()
            return session.Session(self.model, [], backend)

    with (
        patch.object(session, "attach_replay", attach_or_fail),
        patch("megatron_cg.cpu.train.Session", Tried),
        patch.object(Trainer, "capture", captured_by_all_or_none),
    ):
        trainer_plan = TrainingPlan(model=plan.model, steps=4, warmup_steps=2, graphs=True)
        train(trainer_plan, root / "graphs")
