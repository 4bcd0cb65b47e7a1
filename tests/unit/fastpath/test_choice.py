"""A run may choose parts of the fast path: its numbers stay, and all ranks must choose alike."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_cg.arguments.fast_path_parts import PARTS, with_dependents
from megatron_cg.errors import CaptureError
from megatron_cg.fastpath import install, install_parts
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.fastpath.test_fast_path import SCENARIOS, trained
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

DENSE = SCENARIOS["dense"]


def without(*parts: str) -> tuple[str, ...]:
    gone = {name for part in parts for name in with_dependents(part)}
    return tuple(name for name in PARTS if name not in gone)


CHOICES = {
    "unshard and main gradients": ("unshard", "main-gradients"),
    "no unshard": without("unshard"),
    "no deferred prefetch": without("deferred-prefetch"),
    "some left out": without("gathers", "last-unit", "main-gradients"),
}


def train_all() -> dict[str, Any]:
    runs = {"eager": trained(DENSE, graphs=False, fast=False)}
    for name, parts in CHOICES.items():
        runs[name] = trained(DENSE, graphs=True, fast=parts)  # type: ignore[arg-type]
    return runs


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", CHOICES)
def test_chosen_parts_train_the_numbers_of_an_eager_run(
    runs: list[dict[str, Any]], name: str
) -> None:
    for rank in runs:
        for key in ("numbers", "shards"):
            assert rank[name][key] == rank["eager"][key]


@pytest.mark.parametrize("name", CHOICES)
def test_only_chosen_parts_are_installed(runs: list[dict[str, Any]], name: str) -> None:
    for rank in runs:
        did = rank[name]
        assert did["parts"] and set(did["parts"]) <= set(CHOICES[name])
        refused = {part for part, why in did["left out"].items() if why == install_parts.NOT_CHOSEN}
        others = set(PARTS) - set(CHOICES[name]) - {"clipping", "optimizer"}
        assert refused == others


def test_every_part_has_a_name_to_choose_it_by(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    monkeypatch.setattr(
        install_parts.FastPath, "_add", lambda _path, name, *_args: added.append(name)
    )
    anything: Any = SimpleNamespace(module=None)
    install(anything, optimizers=[anything], replays=[anything])
    assert sorted([*added, "deferred-prefetch"]) == sorted(PARTS)


def test_a_part_without_one_that_it_needs_is_left_out(dense_model: Any) -> None:
    path = install(dense_model.module, parts=("gradients", "main-gradients"))
    assert (
        path.parts == ["main-gradients"] and path.left_out["gradients"] == install_parts.NOT_CHOSEN
    )
    path.close()


@pytest.mark.parametrize(
    ("parts", "strategy", "defers"),
    [
        (PARTS, "optim_grads_params", True),
        (without("deferred-prefetch"), "optim_grads_params", False),
        # No weight is detached from autograd, so no launch would issue what is held.
        (PARTS, "optim_grads", False),
    ],
    ids=["all", "not chosen", "not applicable"],
)
def test_gathers_are_deferred_only_where_a_launch_issues_them(
    parts: tuple[str, ...], strategy: str, defers: bool, one_rank: None
) -> None:
    from megatron_cg.backends.tape.tape_backend import TapeBackend

    options = {"data_parallel_sharding_strategy": strategy}
    with trainer_of(CpuModelConfig(layers=2, fsdp_options=options), graphs=True) as trainer:
        trainer.step()
        session = trainer.capture(TapeBackend(), fast_path=parts)
        assert bool(session.fast_path.deferred._graphed) is defers


@pytest.mark.parametrize("other", [False, ("unshard", "last-unit")], ids=["none", "fewer"])
def test_ranks_that_choose_otherwise_capture_nothing(other: Any) -> None:
    for found in on_ranks(partial(capture_unlike, other)):
        assert "ranks would capture different graphs" in found["error"]
        assert "the same --cg-fast-path" in found["error"]
        assert found["hooks are back"] and found["steps"] == 3


def capture_unlike(other: Any) -> dict[str, Any]:
    from megatron_cg.backends.tape.tape_backend import TapeBackend
    from megatron_cg.consensus.exchange import Agreement
    from tests.unit.fastpath.test_parts import state

    rank = dist.get_rank()
    with trainer_of(CpuModelConfig(layers=2), graphs=True) as trainer:
        agreement = Agreement()
        steps = [trainer.step() for _ in range(2)]
        before = state(trainer.model.module)
        with pytest.raises(CaptureError) as error:
            trainer.capture(TapeBackend(), agreement, fast_path=True if rank == 0 else other)
        back = state(trainer.model.module) == before
        steps.append(trainer.step())
        agreement.close()
    return {"error": str(error.value), "hooks are back": back, "steps": len(steps)}
