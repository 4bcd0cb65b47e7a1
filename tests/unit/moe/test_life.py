"""A run whose graphs hold dropless experts: failed, verified, left, deleted and captured again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.consensus import exchange
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit import trainers
from tests.unit.grouped_linear import grouped_experts, in_place_of_te
from tests.unit.moe.test_training import EXPERTS, OVERLAPPED
from tests.unit.ranks import on_ranks
from tests.unit.runs.test_one_rank_failures import no_hang

LAYERS, STEPS, FAILED, CAPTURED, SHORT, EVALUATED, DELETED, AGAIN = 2, 11, 1, 2, 5, 6, 7, 9
"""Steps: a failed capture before, captured before, with a short batch, evaluated before, deleted
and captured before."""
LIVES: dict[str, dict[str, Any]] = {"experts": {}, "shared expert, overlapped": OVERLAPPED}
PERMUTE = "megatron.core.transformer.moe.token_dispatcher.permute"
"""Called after the first stage of a shared expert."""


@contextmanager
def trainer_of(scopes: tuple[str, ...], *, graphs: bool = True, **options: Any) -> Iterator[Any]:
    """A trainer of two ranks that share the experts; ``options`` are those of Megatron's model."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_cg.moe.install import use_device_counts

    destroy_moe_metrics_tracker()
    with ExitStack() as undo:
        if scopes == EXPERTS:
            undo.enter_context(in_place_of_te())
            undo.callback(use_device_counts())
        shape = CpuModelConfig(
            layers=LAYERS,
            experts=4,
            grouped=grouped_experts,
            expert_parallel=2,
            options=options,
            graph_modules=scopes,
        )
        yield undo.enter_context(trainers.trainer_of(shape, graphs=graphs))


def captured(trainer: Any, **options: Any) -> Any:
    return trainer.capture(TapeBackend(), Agreement(), **options)


def failed(trainer: Any) -> str:
    with patch(PERMUTE, side_effect=RuntimeError("no permutation")):
        try:
            captured(trainer)
        except RuntimeError as error:
            return str(error)
    raise AssertionError("the capture did not fail")


def live(options: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    steps: list[list[str]] = []
    done: list[dict[str, int]] = []
    error = ""
    scopes = EXPERTS if ours else ("attn",)
    with trainer_of(scopes, graphs=ours, **options) as trainer, ExitStack() as undo:
        for step in range(STEPS):
            if ours and step == FAILED:
                error = failed(trainer)
            if ours and step in (CAPTURED, AGAIN):
                session = captured(trainer, policy=ReplayPolicy("eager", verify_interval=2))
                undo.callback(session.close)
            if ours and step == DELETED:
                session.close()
            if step == EVALUATED:
                trainer.model.eval()
                with torch.no_grad():
                    steps.append([float(trainer._forward().sum()).hex()])
                trainer.model.train()
            with trainers.half_a_batch(trainer, step == SHORT):
                steps.append([number.hex() for number in trainer.step()])
            if ours and step >= CAPTURED:
                names = ("replayed", "eager", "mismatched", "verified", "outputs_only")
                done.append({name: getattr(session.counters, name) for name in names})
        if ours:
            session.close()
    return {"steps": steps, "done": done, "error": error}


def live_all() -> dict[str, Any]:
    return {
        name: {way: live(life, ours=way == "ours") for way in ("megatron", "ours")}
        for name, life in LIVES.items()
    }


@pytest.fixture(scope="module")
def lives() -> list[dict[str, Any]]:
    return on_ranks(live_all)


@pytest.mark.parametrize("name", LIVES)
def test_every_loss_and_norm_is_megatrons(lives: list[dict[str, Any]], name: str) -> None:
    for found in lives:
        life = found[name]
        assert len(life["megatron"]["steps"]) == STEPS + 1
        assert life["ours"]["steps"] == life["megatron"]["steps"]
        assert "no permutation" in life["ours"]["error"]


@pytest.mark.parametrize("name", LIVES)
def test_both_ranks_replay_verify_and_leave_their_graphs_together(
    lives: list[dict[str, Any]], name: str
) -> None:
    for found in lives:
        done = found[name]["ours"]["done"]
        before, short = done[SHORT - CAPTURED - 1], done[SHORT - CAPTURED]
        assert before["replayed"] == LAYERS * (SHORT - CAPTURED)
        assert before["verified"] > 0 and before["outputs_only"] == 0
        assert before["mismatched"] == before["eager"] == 0
        assert short["replayed"] == before["replayed"]
        assert short["mismatched"] == short["eager"] == LAYERS
        assert done[-1]["replayed"] == LAYERS * (STEPS - AGAIN)


def short_alone(folder: Path) -> None:
    """Rank 1 alone has fewer tokens; rank 0 waits for it inside its graph, until it has ended."""
    soon = timedelta(seconds=3)
    with trainer_of(("attn", "moe")) as trainer, no_hang():
        trainer.step()
        captured(trainer)
        trainer.step()
        with (
            trainers.half_a_batch(trainer, dist.get_rank() == 1),
            patch.object(exchange, "FALLING_BACK", soon),
            patch.object(exchange, "TIMEOUT", soon),
        ):
            try:
                trainer.step()
            except ReplayMismatchError as error:
                (folder / f"{dist.get_rank()}.txt").write_text(str(error))
                raise


def test_a_rank_with_fewer_tokens_alone_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException):
        run_processes(partial(short_alone, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["1.txt"]
    text = (tmp_path / "1.txt").read_text()
    assert "The graph holds collectives" in text and "shape" in text
