"""Faults between capture and replay, and captures that fail on one rank of two, on real GPUs."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_cg.tools.align.run import OVERDUE
from megatron_cg.tools.record.compare import Outcome
from tests.functional.cases import (
    EP2,
    EXPERTS,
    LIFE,
    MOE,
    PEERS,
    PREPROCESS,
    TORCH_GEMM,
    Case,
    batch,
)
from tests.functional.outcomes import assert_failed, assert_left_eager, assert_trained_alike

pytestmark = pytest.mark.fault
Align = Callable[..., Outcome]
Log = Callable[..., str]
LAYERS, STEP, WARMUP, STEPS, MICROBATCHES = 3, 7, 3, 12, 2
TRAINED = STEPS - WARMUP
"""Steps with graphs."""


def faulty(name: str, fault: str, base: str = "dense", *flags: str) -> Case:
    return replace(LIFE[base], name=name, scenario=f"fault@{fault}", graph_flags=flags)


@pytest.mark.parametrize("fault", ["shape", "address"])
def test_a_fault_on_one_rank_is_seen_and_training_stays_bit_equal(
    fault: str, align: Align, log: Log
) -> None:
    case = faulty(fault, fault)
    graphed = assert_trained_alike(align(case), STEPS)
    whole, broken = (graphed[index]["graphs"] for index in sorted(graphed))
    assert whole["mismatched"] == 0 and broken["mismatched"] > 0
    assert broken["eager"] == broken["mismatched"]
    assert f"({fault})" in log(case) and "no replay of layer 0" in log(case)


def test_a_replaced_parameter_is_seen_and_training_stays_bit_equal(align: Align) -> None:
    """On all ranks: on one alone, its gradient would not come, and an eager run would hang too."""
    for rank in assert_trained_alike(align(faulty("parameter", "parameter@all")), STEPS).values():
        assert rank["graphs"]["mismatched"] == MICROBATCHES * (STEPS - STEP + 1)


def test_a_shape_that_all_ranks_change_where_graphs_hold_dropless_experts(align: Align) -> None:
    outcome = align(faulty("shape-experts", "shape@all", "experts", *TORCH_GEMM))
    for rank in assert_trained_alike(outcome, STEPS).values():
        assert rank["graphs"]["mismatched"] == LAYERS * MICROBATCHES * (STEPS - STEP + 1)


@pytest.mark.parametrize(
    ("routing", "name"),
    [
        *(("one", "peers"), ("first", "experts"), ("first", "peers"), ("crosswise", "peers")),
        *(("turning", "peers"), ("turning", "cublas"), ("turning", "cublas-fp8")),
    ],
)
def test_experts_and_ranks_without_tokens_or_with_all_of_them(
    routing: str, name: str, align: Align
) -> None:
    case = replace(LIFE[name], name=f"route-{routing}-{name}", scenario=f"route@{routing}")
    for rank in assert_trained_alike(align(case), STEPS).values():
        assert rank["graphs"]["replayed"] == LAYERS * MICROBATCHES * TRAINED


@pytest.mark.kills
@pytest.mark.parametrize(
    ("fault", "flags", "words"),
    [
        ("address@all", ("--cg-on-mismatch", "error"), "The FSDP buffer of unit"),
        ("address-in-backward@all", (), "in the backward pass"),
    ],
)
def test_what_cannot_go_on_ends_with_its_cause(
    fault: str, flags: tuple[str, ...], words: str, align: Align
) -> None:
    outcome = align(faulty(fault.partition("@")[0], fault, "dense", *flags))
    assert_failed(outcome, "ReplayMismatchError", words)


@pytest.mark.kills
@pytest.mark.parametrize(
    ("scopes", "flags"), [(PREPROCESS, ()), (EXPERTS, PEERS)], ids=["preprocess", "peers"]
)
def test_a_graph_with_collectives_is_not_left_by_one_rank_alone(
    scopes: tuple[str, ...], flags: tuple[str, ...], align: Align, log: Log
) -> None:
    case = replace(
        faulty(f"collectives-{scopes[-1]}-{len(flags)}", "shape", "moe", *flags),
        scopes=scopes,
        preset=MOE,
        flags=(*batch(8), *EP2),
    )
    assert_failed(align(case))
    assert "The graph holds collectives" in log(case)
    assert OVERDUE not in log(case)


@pytest.mark.parametrize(("which", "fast"), [("input", True), ("weight", False)])
def test_a_wrong_gradient_is_found_and_the_part_run_eagerly(
    which: str, fast: bool, align: Align
) -> None:
    flags = ("--cg-verify-interval", "1", *(() if fast else ("--cg-no-fsdp-fast-path",)))
    case = replace(LIFE["dense"], name=f"gradient-{which}-{fast}", graph_flags=flags)
    outcome, passes = align(case, mutation=f"wrong-gradient@{which}@1"), MICROBATCHES * TRAINED
    for rank in assert_trained_alike(outcome, STEPS).values():
        assert rank["graphs"]["mismatched"] == rank["graphs"]["eager"] == passes
        assert rank["graphs"]["replayed"] == (LAYERS - 1) * passes
        # The graph that the first verification refutes is neither replayed nor verified again.
        assert rank["graphs"]["verified"] == (LAYERS - 1) * passes + 1
        assert rank["graphs"]["gradients_unstable"] == 0


@pytest.mark.kills
def test_a_hook_that_raises_on_one_rank_ends_the_run(align: Align, log: Log) -> None:
    case = replace(LIFE["dense"], name="hook", graph_flags=("--cg-on-failure", "eager"))
    outcome = align(case, mutation="fail@hook@1")
    assert_failed(outcome, "OutOfStepError", "raised ForcedError: forced in hook")
    assert OVERDUE not in log(case)


STAGES = (
    "memory capture-forward capture-forward-end invalid upload capture-backward publish install"
)


@pytest.mark.parametrize("stage", STAGES.split())
def test_a_capture_that_fails_on_one_rank_leaves_all_eager(stage: str, align: Align) -> None:
    case = replace(
        LIFE["dense"], name=f"one-rank-{stage}", graph_flags=("--cg-on-failure", "eager")
    )
    assert_left_eager(align(case, mutation=f"fail@{stage}@1"), STEPS)
