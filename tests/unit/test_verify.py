"""Replays beside eager passes: equal bits pass, one changed bit does not, and training stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.verify import _first_difference
from megatron_cg.watch import ReplayPolicy

STEPS = 6


def run(
    policy: ReplayPolicy | None, *, experts: int = 0, corrupt: bool = False
) -> tuple[list[Any], Any, Any]:
    """Losses and norms, counters, and MoE metrics of a training run."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import (
        destroy_moe_metrics_tracker,
        get_moe_metrics_tracker,
    )

    from megatron_cg.backends.tape import TapeBackend
    from megatron_cg.cpu.model import transformer_layers
    from megatron_cg.cpu.plan import CpuModelConfig, TrainingPlan
    from megatron_cg.cpu.train import Trainer

    scopes = ("attn", "moe_router") if experts else ("attn", "mlp")
    model = CpuModelConfig(layers=2, graph_modules=scopes, experts=experts, dropout=0.2)
    destroy_moe_metrics_tracker()
    trainer: Any = Trainer(TrainingPlan(model=model, graphs=policy is not None))
    session = None
    try:
        numbers = [trainer.step() for _ in range(2)]
        if policy is not None:
            session = trainer.capture(TapeBackend(), policy=policy)
        get_moe_metrics_tracker().clear()
        if corrupt:
            graph = transformer_layers(trainer.model)[1].cuda_graphs[0]
            graph._graph = one_bit_wrong(graph._graph)
        numbers += [trainer.step() for _ in range(STEPS)]
        metrics = {k: v.values.tolist() for k, v in get_moe_metrics_tracker().metrics.items()}
        return numbers, session.counters if session else None, metrics
    finally:
        if session is not None:
            session.close()
        destroy_moe_metrics_tracker()
        parallel_state.destroy_model_parallel()


def one_bit_wrong(graph: Any) -> Any:
    class Wrong:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            (output,) = graph(*args, **kwargs)
            with torch.no_grad():
                output.view(-1).view(torch.int16)[7] ^= 1
            return (output,)

        def reset(self) -> None:
            graph.reset()

    return Wrong()


@pytest.mark.parametrize("experts", [0, 4])
def test_verification_finds_nothing_and_changes_nothing(experts: int, one_rank: None) -> None:
    eager, _, eager_metrics = run(None, experts=experts)
    numbers, counters, metrics = run(ReplayPolicy("error", 2), experts=experts)
    assert numbers == eager and metrics == eager_metrics
    assert bool(metrics) == bool(experts)
    counters.expect(verified=2 * STEPS // 2, mismatched=0, replayed=2 * STEPS)


def test_one_wrong_bit_is_found_and_the_part_run_eagerly(one_rank: None) -> None:
    eager, _, _ = run(None)
    numbers, counters, _ = run(ReplayPolicy("eager", 1), corrupt=True)
    assert numbers == eager
    counters.expect(mismatched=STEPS, replayed=STEPS, eager=STEPS)


def test_one_wrong_bit_ends_the_run_where_that_was_asked_for(one_rank: None) -> None:
    with pytest.raises(ReplayMismatchError, match=r"layer 1.*output 0.*different in 1 of"):
        run(ReplayPolicy("error", 3), corrupt=True)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ([torch.tensor([0.0])], [torch.tensor([-0.0])], "different in 1 of 4 bytes"),
        ([torch.ones(2)], [torch.ones(3)], "shape (3,)"),
        ([torch.ones(2)], [None], "None"),
        ([torch.ones(2)], [], "the number of outputs"),
    ],
)
def test_outputs_are_compared_by_their_bits(one: Any, two: Any, words: str) -> None:
    found = _first_difference(one, two)
    assert found is not None and words in found.text("layer 0", 0)


def test_nan_is_nan() -> None:
    nan = torch.full((3,), float("nan"), dtype=torch.bfloat16)
    assert _first_difference([nan, None], [nan.clone(), None]) is None
