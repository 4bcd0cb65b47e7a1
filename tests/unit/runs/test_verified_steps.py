"""Verified steps find what lies between units, which no verification of a unit sees."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.replay.verify import Digests
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import layers_of, trainer_of

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MODEL = CpuModelConfig(
    layers=2, experts=4, graph_modules=("attn", "moe_router"), dropout=0.1, options=BIAS
)
STEPS, WARMUP, FAULTY = 4, 1, 2
ROUTER = r"buffer \S*layers\.1\.mlp\.router\.local_tokens_per_expert"
Fault = Callable[[Any, torch.Tensor], object]
"""Changes something behind a replay, given the last layer's router and output."""


def overwrite_output(_router: Any, output: torch.Tensor) -> None:
    """As a later replay that shares its memory."""
    output.data[0, 0, 0] += 1


def double_gradient(_router: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 2)


def count_twice(router: Any, _output: torch.Tensor) -> None:
    router.local_tokens_per_expert.mul_(2)


def rebind(router: Any, _output: torch.Tensor) -> None:
    router.local_tokens_per_expert = router.local_tokens_per_expert * 0


def double_metrics(_router: Any, _output: torch.Tensor) -> None:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().metrics["load_balancing_loss"].values.mul_(2)


def draw(_router: Any, _output: torch.Tensor) -> None:
    torch.rand(())


REDUCED = ("output", "gradient")
"""What both ranks see."""
FAULTS: dict[str, tuple[Fault, str]] = {
    "output": (overwrite_output, "numbers: result, gradient"),
    "gradient": (double_gradient, r"numbers: gradient \S*layers\.1\."),
    "buffer": (count_twice, ROUTER),
    "rebound": (rebind, ROUTER),
    "metrics": (double_metrics, "load_balancing_loss"),
    "random": (draw, "random state of the host"),
}
"""And what the message names."""


def train(fault: Fault | None, on_mismatch: Any, *, graphs: bool = True) -> dict[str, Any]:
    """Steps of which ``FAULTY`` has a fault, on rank 1 and in the second microbatch alone."""
    policy = ReplayPolicy(on_mismatch, verify_interval=1, verify_steps=1)
    numbers, replayed, error, passes = list[Any](), list[int](), "", 0
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of(MODEL, microbatches=2, graphs=graphs))

        def behind(_norm: Any, args: tuple[torch.Tensor]) -> None:
            nonlocal passes
            by_graphs = graphs and not trainer.session.mismatches.conditions.all_eager
            if fault is not None and by_graphs and step == FAULTY and dist.get_rank() == 1:
                passes += 1
                if passes % 2 == 0:
                    fault(layers_of(trainer)[-1].mlp.router, args[0])

        for step in range(STEPS):
            if step == WARMUP:
                decoder = next(m for m in trainer.model.modules() if hasattr(m, "final_layernorm"))
                stack.callback(decoder.final_layernorm.register_forward_pre_hook(behind).remove)
                if graphs:
                    trainer.capture(TapeBackend(), Agreement(), policy=policy)
            try:
                numbers.append([number.hex() for number in trainer.step()])
            except ReplayMismatchError as raised:
                error = str(raised)
                break
            replayed.append(trainer.session.counters.replayed if trainer.session else 0)
        counts = trainer.session.counters.as_dict() if graphs else {}
    return {"numbers": numbers, "replayed": replayed, "error": error, "counts": counts}


def train_all() -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")
    found = {name: train(fault, "error") for name, (fault, _) in FAULTS.items()}
    found["eager"] = train(None, "eager", graphs=False)
    found["alike"] = train(None, "error")
    found["goes on"] = train(double_gradient, "eager")
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_units_of_a_rank_ends_all(results: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(results):
        run = found[name]
        assert len(run["numbers"]) == FAULTY and run["counts"]["steps_differed"] == 1
        is_seen = rank == 1 or name in REDUCED
        words = FAULTS[name][1] if is_seen else "none on this rank"
        assert re.search(words, run["error"]), run["error"]


def test_steps_without_a_fault_are_those_of_eager_training(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["alike"]["numbers"] == found["eager"]["numbers"]
        counts = found["alike"]["counts"]
        assert counts["steps_verified"] == STEPS - WARMUP and counts["steps_differed"] == 0
        assert counts["replayed"] > 0 and counts["eager"] == 0


def test_after_a_fault_all_ranks_train_eagerly(results: list[dict[str, Any]]) -> None:
    """The step itself has eager numbers too."""
    for found in results:
        run = found["goes on"]
        assert run["numbers"] == found["eager"]["numbers"]
        assert run["replayed"][FAULTY - 1] < run["replayed"][FAULTY] == run["replayed"][-1]
        assert run["counts"]["steps_differed"] == 1


def differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    return Digests([("it", one)]).differences(Digests([("it", two)])) == ["it"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 3, 4096, 3 * 4096 + 5])
def test_digests_see_one_bit_and_two_places(dtype: torch.dtype, size: int) -> None:
    one = torch.arange(size).remainder(2).to(dtype)
    two = one.clone()
    assert not differ(one, two)
    two.view(torch.uint8)[-1] ^= 1
    assert differ(one, two)
    if size > 1:
        swapped = one.clone()
        swapped[[0, -1 - size % 2]] = one[[-1 - size % 2, 0]]
        assert differ(one, swapped)


def test_digests_see_bits_that_compare_equal_or_never() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differ(torch.tensor(0.0), torch.tensor(-0.0)) and differ(nan[0], nan[1])
    assert not differ(nan, nan.clone())
    assert differ(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert Digests([("it", None)]).differences(Digests([("it", torch.zeros(1))])) == ["it"]
    on_meta = torch.empty(2, device="meta")
    assert not Digests([("it", on_meta)]).differences(Digests([("it", on_meta)]))
