"""The verdict on two records, above all that it is not ``identical`` when it must not be."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron_cg.tools.record.compare import DIFFERENT, FAILED, IDENTICAL, NOT_COMPARABLE, compare
from tests.unit.tools.records import CAPTURED, LAYERS, make_record

Record = dict[str, Any]
Run = dict[int, Record]


@pytest.fixture
def eager() -> Run:
    return {rank: make_record(steps=8, graphs=False, rank=rank, ranks=2) for rank in range(2)}


@pytest.fixture
def graphed() -> Run:
    return {rank: make_record(steps=8, rank=rank, ranks=2) for rank in range(2)}


def test_equal_runs_are_identical(eager: Run, graphed: Run) -> None:
    for rank in eager.values():
        # It changes no number of an eager run.
        rank["versions"]["megatron-cg"] = "0.0.1"
    result = compare(eager, graphed)
    assert (result.status, result.reason) == (IDENTICAL, "")
    assert result.shards == 4 and len(result.values) == 2 * 3 * 8
    replayed = 2 * (8 - CAPTURED) * LAYERS
    assert (result.graphs["captured"], result.graphs["replayed"]) == (2 * LAYERS, replayed)


def test_a_verified_step_that_differed_is_a_difference(eager: Run, graphed: Run) -> None:
    """Its numbers, and those of all later steps, are the eager ones."""
    graphed[1]["graphs"]["steps_differed"] = 1
    assert compare(eager, graphed).status == DIFFERENT


def one_bit_more(numbers: dict[str, Any], name: str) -> None:
    numbers[name] = math.nextafter(numbers[name], math.inf)


def change_loss(run: Run) -> None:
    one_bit_more(run[1]["steps"][1]["losses"], "lm loss")
    one_bit_more(run[0]["steps"][2]["losses"], "lm loss")


def change_norm_and_shard(run: Run) -> None:
    one_bit_more(run[0]["steps"][2], "grad_norm")
    run[0]["parameters"]["main:w"] = "changed"


def rename_loss(run: Run) -> None:
    losses = run[0]["steps"][0]["losses"]
    losses["mtp loss"] = losses.pop("lm loss")


NOTHING_BUT_A_SHARD = (
    "every loss and gradient norm agrees, but 1 of 4 parameter shards differ, first rank 1 model:w"
)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (change_loss, "step 2, rank 1, lm loss: 5.75"),
        (change_norm_and_shard, "step 3, rank 0, gradient norm: 1.33333"),
        (change_norm_and_shard, "tensor at the end: rank 0 main:w"),
        (lambda run: run[0]["steps"].pop(), "step 8, rank 0, lm loss: 5.0"),
        (rename_loss, "step 1, rank 0, lm loss: 5.875 (0x1.7"),
        (
            lambda run: run[0]["steps"][1].update(grad_norm=math.nan),
            "in the eager run, nan (nan) in the graph run",
        ),
        (lambda run: run[1]["parameters"].update({"model:w": "changed"}), NOTHING_BUT_A_SHARD),
        (lambda run: run[1]["parameters"].pop("model:w"), NOTHING_BUT_A_SHARD),
    ],
)
def test_one_bit_is_found_and_the_first_is_named(
    change: Callable[[Run], object], where: str, eager: Run, graphed: Run
) -> None:
    change(graphed)
    result = compare(eager, graphed)
    assert result.status == DIFFERENT and where in result.reason


def both(change: Callable[[Record], object]) -> Callable[[Run, Run], object]:
    def apply(eager: Run, graphed: Run) -> None:
        for run in (eager, graphed):
            for rank in run.values():
                change(rank)

    return apply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _, run: run[1]["graphs"].update(replayed=0), "replayed no graph on rank 1"),
        (both(lambda rank: rank.update(graphs=None)), "the graph run captured no graph"),
        (lambda _, run: run.pop(1), "the graph run has records of 1 of its 2 ranks, none of 1"),
        (
            lambda _, run: run[1].update(error="CaptureError: forced"),
            "the graph run, rank 1: CaptureError: forced",
        ),
        (
            both(lambda rank: [step.update(skipped=True) for step in rank["steps"]]),
            "the eager run, rank 0: every step was skipped",
        ),
        (
            both(lambda rank: rank["steps"][1]["losses"].update({"lm loss": math.nan})),
            "lm loss is nan at step 2, and NaN equals any NaN",
        ),
        (both(lambda rank: rank["parameters"].clear()), "no parameter shard was recorded"),
        (both(lambda rank: rank["steps"].clear()), "did not run to its end (0 steps recorded)"),
        (both(lambda rank: rank.update(finished=False)), "training did not run to its end"),
    ],
)
def test_equality_that_shows_nothing_is_a_failure(
    spoil: Callable[[Run, Run], object], reason: str, eager: Run, graphed: Run
) -> None:
    assert compare(eager, copy.deepcopy(graphed)).status == IDENTICAL
    spoil(eager, graphed)
    result = compare(eager, graphed)
    assert result.status == FAILED and reason in result.reason


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda rank: rank["versions"].update(torch="1.0"), "torch 0.0 and 1.0"),
        (lambda rank: rank.update(device="cpu"), "device a made-up GPU and cpu"),
    ],
)
def test_runs_that_were_not_made_alike_are_told_apart_before_their_numbers_are_compared(
    change: Callable[[Record], object], where: str, eager: Run, graphed: Run
) -> None:
    """They are not reported as training that is not deterministic."""
    for rank in graphed.values():
        rank["steps"][0]["grad_norm"] = 9.0
        change(rank)
    result = compare(eager, graphed)
    assert result.status == NOT_COMPARABLE and not result.values
    assert result.reason == f"the eager run and the graph run have different setups: {where}"


def test_another_number_of_ranks_is_not_comparable(eager: Run) -> None:
    result = compare(eager, {0: make_record(steps=8)})
    assert result.status == NOT_COMPARABLE and "world_size 2 and 1" in result.reason
