"""Megatron-FSDP's own buffers moved under real graphs, in two processes, on one rank or on both."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cg.cpu.launch import run_processes
from megatron_cg.errors import ReplayMismatchError

BEFORE, AFTER, LAYERS = 3, 7, 3


def play(root: Path) -> None:
    """In one process: an eager run, and one with graphs for each policy and place."""
    from megatron.core import parallel_state

    from megatron_cg.cpu.model import CpuModelConfig
    from megatron_cg.cpu.train import TrainingPlan
    from megatron_cg.cpu.voting import VotingTrainer
    from megatron_cg.watch import ReplayPolicy

    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"), dropout=0.1)
    plan = TrainingPlan(model, graphs=True)

    def run(
        policy: str | None,
        ranks: tuple[int, ...] = (),
        in_backward: bool = False,
        shape: bool = False,
        table: bool = False,
    ) -> Any:
        trainer: Any = VotingTrainer(plan, ReplayPolicy(policy or "eager"))  # type: ignore[arg-type]
        numbers, error = [], ""
        try:
            numbers += [trainer.step() for _ in range(BEFORE)]
            if policy is not None:
                trainer.start()
            if shape:
                change_shape(trainer)
            elif table:
                change_table(trainer)
            elif dist.get_rank() in ranks and not in_backward:
                kept.append(move_buffers())
            if dist.get_rank() in ranks and in_backward:
                trainer.model.register_forward_hook(lambda *_: kept.append(move_buffers()))
            numbers += [trainer.step() for _ in range(AFTER)]
        except ReplayMismatchError as found:
            error = str(found)
        report = trainer.report()
        trainer.close()
        parallel_state.destroy_model_parallel()
        return {"numbers": numbers, "error": error, "graphs": report}

    kept: list[Any] = []
    found = {
        "nothing": run(None),
        "moved eagerly": run(None, ranks=(1,)),
        "other shape eagerly": run(None, shape=True),
        "untouched": run("eager"),
        "eager": run("eager", ranks=(1,)),
        "recapture": run("recapture", ranks=(1,)),
        "recapture that never helps": run("recapture", ranks=(1,), shape=True),
        "table": run("recapture", table=True),
        "error": run("error", ranks=(0, 1)),
        "backward": run("eager", ranks=(0, 1), in_backward=True),
    }
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def change_shape(trainer: Any) -> None:
    """From now on one sequence a microbatch on this rank."""
    from megatron_cg.cpu.data import Batches

    shape = trainer.plan.model
    size = 1 if dist.get_rank() == 1 else 2
    trainer._batches = Batches(None, size, shape.sequence_length, shape.vocabulary)


def change_table(trainer: Any) -> None:
    """From now on every pass has a rotary table of its own, on rank 1."""
    from megatron_cg.cpu.model import transformer_layers

    def copied(_module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "rotary_pos_emb": kwargs["rotary_pos_emb"].clone()}

    if dist.get_rank() == 1:
        for layer in transformer_layers(trainer.model):
            layer.register_forward_pre_hook(copied, with_kwargs=True)


def move_buffers() -> Any:
    """Let Megatron-FSDP allocate its unsharded buffers anew; returns the old ones, kept alive."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import utils

    pool = utils.get_global_memory_buffer()
    old = dict(pool.buffer)
    pool.buffer.clear()
    return old


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("moved")
    run_processes(partial(play, root))
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def test_an_eager_run_does_not_mind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["moved eagerly"]["numbers"] == rank["nothing"]["numbers"]


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


def test_all_ranks_capture_again_when_one_asks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["recapture"]["numbers"] == rank["nothing"]["numbers"]
        assert rank["recapture"]["graphs"]["captured"] == 2 * LAYERS
    whole, moved = (rank["recapture"]["graphs"] for rank in ranks)
    assert moved["mismatched"] > 0 and whole["mismatched"] == 0
    assert moved["replayed"] > 0


def test_a_table_that_changes_after_all_is_copied_from_the_next_capture_on(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["table"]["numbers"] == rank["nothing"]["numbers"]
        assert rank["table"]["graphs"]["captured"] == 2 * LAYERS
    counts = ranks[1]["table"]["graphs"]
    assert counts["mismatched"] == 2 * LAYERS and counts["replayed"] == LAYERS * (AFTER - 2)
    assert counts["inputs_copied"] == 3 * counts["replayed"]


def test_a_shape_that_stays_another_is_captured_again_for_once_only(
    ranks: list[dict[str, Any]],
) -> None:
    """Capture takes its shapes from the configuration, so it cannot help; and nobody loops."""
    name = "recapture that never helps"
    for rank in ranks:
        assert rank[name]["numbers"] == rank["other shape eagerly"]["numbers"]
        assert rank[name]["numbers"] != rank["nothing"]["numbers"]
        assert rank[name]["graphs"]["captured"] == 2 * LAYERS
    assert ranks[1][name]["graphs"]["replayed"] == 0
    assert ranks[0][name]["graphs"]["replayed"] == LAYERS * AFTER


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
