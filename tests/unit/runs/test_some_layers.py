"""Graphs of some layers only: the others share FSDP's two buffers with them, and stay eager."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

LAYERS, STEPS, CAPTURED_AFTER = 4, 3, 1
CHOSEN = [(2,), (0, 1), (0, 3)]
"""Layers without a graph before, between and behind those that have one."""


def trained(only: tuple[int, ...], fast: bool) -> dict[str, Any]:
    from megatron_cg.telemetry.record_shards import parameter_digests

    shape = CpuModelConfig(layers=LAYERS, hidden_size=16, ffn_hidden_size=16)
    with trainer_of(shape, graphs=bool(only), microbatches=2) as trainer:
        numbers = [trainer.step() for _ in range(CAPTURED_AFTER)]
        pipeline = trainer.model.module.all_gather_pipeline
        if only:
            trainer.capture(TapeBackend(), only=only, fast_path=fast)
            assert fast or "all_gather_params" not in vars(pipeline)
        numbers += [trainer.step() for _ in range(STEPS - CAPTURED_AFTER)]
        found: dict[str, Any] = {"numbers": numbers, "shards": parameter_digests(trainer.model)}
        if trainer.session is not None:
            counts = trainer.session.counters.as_dict()
            found |= {name: counts[name] for name in ("captured", "replayed", "eager")}
        return found


def train_all() -> dict[str, Any]:
    runs = {"eager": trained((), fast=False)}
    for only in CHOSEN:
        for fast in (False, True):
            runs[f"{only} {fast}"] = trained(only, fast)
    return runs


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("fast", [False, True], ids=["Megatron's own", "fast path"])
@pytest.mark.parametrize("only", CHOSEN, ids=str)
def test_numbers_and_shards_are_those_of_an_eager_run(
    results: list[dict[str, Any]], only: tuple[int, ...], fast: bool
) -> None:
    for runs in results:
        found, eager = runs[f"{only} {fast}"], runs["eager"]
        assert (found["numbers"], found["shards"]) == (eager["numbers"], eager["shards"])
        replays = len(only) * 2 * (STEPS - CAPTURED_AFTER)
        counts = {"captured": len(only), "replayed": replays, "eager": 0}
        assert {name: found[name] for name in counts} == counts


def test_a_gather_that_fails_at_capture_is_the_error_that_is_told(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.tools.cpu.train import Trainer

    trainer = Trainer(TrainingPlan(CpuModelConfig(layers=2), graphs=True))
    losses = [trainer.step()[0]]
    pipeline = trainer.model.module.all_gather_pipeline
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no buffer for bucket"):
        patch.setattr(pipeline, "get_fsdp_buffer", no_buffer(pipeline))
        trainer.capture(TapeBackend())
    losses += [trainer.step()[0] for _ in range(2)]
    assert len(set(losses)) == 3


def no_buffer(pipeline: Any) -> Any:
    """``get_fsdp_buffer`` that fails once, as a gather asks that has marked its bucket by then."""
    own, failed = pipeline.get_fsdp_buffer, list[int]()

    def get(bucket: int, bwd: bool = False) -> Any:
        status = pipeline.bucket_status[pipeline.get_bucket_key(bucket, bwd)]
        if status.name == "COMMUNICATING" and not failed:
            failed.append(bucket)
            raise MemoryError(f"no buffer for bucket {bucket}")
        return own(bucket, bwd)

    return get
