"""The verdict on two records, above all that it is not ``identical`` when it must not be."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron_cg.tools.align.compare import (
    DIFFERENT,
    FAILED,
    IDENTICAL,
    NOT_COMPARABLE,
    compare,
    missing_ranks,
)
from tests.unit.tools.align.records import Record, capture, make_rank


@pytest.fixture
def eager() -> dict[int, Record]:
    return {rank: make_rank(rank=rank, world_size=2) for rank in range(2)}


@pytest.fixture
def graphed() -> dict[int, Record]:
    counts = {"captured": 2, "replayed": 18, "eager": 0}
    return {rank: make_rank(dict(counts), rank=rank, world_size=2) for rank in range(2)}


def test_equal_runs_are_identical(eager: dict[int, Record], graphed: dict[int, Record]) -> None:
    result = compare(eager, graphed)
    assert (result.status, result.reason) == (IDENTICAL, "")
    assert result.shards == 4 and len(result.values) == 2 * 2 * 3
    assert result.graphs == {"captured": 4, "replayed": 36, "eager": 0}


def one_bit_more(numbers: dict[str, Any], name: str) -> None:
    numbers[name] = math.nextafter(numbers[name], math.inf)


def change_loss(run: dict[int, Record]) -> None:
    one_bit_more(run[1]["steps"][1]["losses"], "lm loss")
    one_bit_more(run[0]["steps"][2]["losses"], "lm loss")


def change_norm(run: dict[int, Record]) -> None:
    one_bit_more(run[0]["steps"][2], "grad_norm")


def drop_step(run: dict[int, Record]) -> None:
    del run[0]["steps"][2]


def rename_loss(run: dict[int, Record]) -> None:
    losses = run[0]["steps"][0]["losses"]
    losses["mtp loss"] = losses.pop("lm loss")


def make_nan(run: dict[int, Record]) -> None:
    run[0]["steps"][1]["grad_norm"] = math.nan


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (change_loss, "step 2, rank 1, lm loss: 4.66666"),
        (change_norm, "step 3, rank 0, gradient norm: 1.28571"),
        (drop_step, "step 3, rank 0, lm loss: 4.33333"),
        (rename_loss, "step 1, rank 0, lm loss: 5.0 (0x1.4"),
        (make_nan, "in the eager run, nan (nan) in the graph run"),
    ],
)
def test_one_bit_is_found_and_the_first_is_named(
    change: Callable[[dict[int, Record]], None],
    where: str,
    eager: dict[int, Record],
    graphed: dict[int, Record],
) -> None:
    change(graphed)
    result = compare(eager, graphed)
    assert result.status == DIFFERENT
    assert where in result.reason


@pytest.mark.parametrize("digest", ["changed", None])
def test_a_shard_that_differs_or_is_missing(
    digest: str | None, eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    if digest is None:
        del graphed[1]["parameters"]["model:w"]
    else:
        graphed[1]["parameters"]["model:w"] = digest
    result = compare(eager, graphed)
    assert result.status == DIFFERENT
    assert result.different_shards == ("rank 1 model:w",)
    assert result.reason == (
        "every loss and gradient norm agrees, but 1 of 4 parameter shards differ, first rank 1 "
        "model:w"
    )


def test_the_first_tensor_is_named_with_the_first_step(
    eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    change_norm(graphed)
    graphed[0]["parameters"]["main:w"] = "changed"
    assert compare(eager, graphed).reason.endswith("tensor at the end: rank 0 main:w")


def both(change: Callable[[Record], None]) -> Callable[[Any, Any], None]:
    def apply(eager: dict[int, Record], graphed: dict[int, Record]) -> None:
        for run in (eager, graphed):
            for rank in run.values():
                change(rank)

    return apply


def no_replay(eager: Any, graphed: Any) -> None:
    graphed[1]["graphs"]["replayed"] = 0


def no_capture(eager: Any, graphed: Any) -> None:
    graphed[0]["graphs"] = graphed[1]["graphs"] = None


def lost_rank(eager: Any, graphed: Any) -> None:
    del graphed[1]


def error(eager: Any, graphed: Any) -> None:
    graphed[1]["error"] = "CaptureError: forced"


def all_skipped(rank: Record) -> None:
    for step in rank["steps"]:
        step["skipped"] = True


def all_nan(rank: Record) -> None:
    rank["steps"][1]["losses"]["lm loss"] = math.nan


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_replay, "the graph run replayed no graph on rank 1"),
        (no_capture, "the graph run captured no graph"),
        (lost_rank, "the graph run has records of 1 of its 2 ranks, none of 1"),
        (error, "the graph run, rank 1: CaptureError: forced"),
        (both(all_skipped), "the eager run, rank 0: every step was skipped"),
        (both(all_nan), "lm loss is nan at step 2, and NaN equals any NaN"),
        (both(lambda rank: rank["parameters"].clear()), "no parameter shard was recorded"),
        (both(lambda rank: rank["steps"].clear()), "did not run to its end (0 steps recorded)"),
        (both(lambda rank: rank.update(finished=False)), "training did not run to its end"),
    ],
)
def test_equality_that_shows_nothing_is_a_failure(
    spoil: Callable[[Any, Any], None],
    reason: str,
    eager: dict[int, Record],
    graphed: dict[int, Record],
) -> None:
    assert compare(eager, copy.deepcopy(graphed)).status == IDENTICAL
    spoil(eager, graphed)
    result = compare(eager, graphed)
    assert result.status == FAILED
    assert reason in result.reason


@pytest.mark.parametrize(("step", "blamed"), [(0, True), (1, True), (2, False)])
def test_a_difference_before_capture_is_not_blamed_on_graphs(
    step: int, blamed: bool, eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    for rank in graphed.values():
        rank["captures"] = [capture(2)]
        rank["steps"][step]["grad_norm"] = 9.0
    result = compare(eager, graphed)
    assert result.status == DIFFERENT
    assert ("both runs were still eager" in result.reason) is blamed


def changed(group: str, name: str, value: Any) -> Callable[[Record], None]:
    return lambda rank: rank["setup"][group].update({name: value})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (changed("model", "hidden_size", 64), "model: hidden_size 32 and 64"),
        (changed("model", "num_experts", 4), "model: num_experts none and 4"),
        (changed("data", "data_path", ["8 bytes"]), "data: data_path ['9 bytes'] and ['8 bytes']"),
        (lambda rank: rank["versions"].update(torch="1.0"), "versions: torch 0.0 and 1.0"),
        (lambda rank: rank.update(device="a GPU"), "machine: device cpu and a GPU"),
    ],
)
def test_runs_that_were_not_made_alike_are_told_apart_before_their_numbers_are_compared(
    change: Callable[[Record], None],
    where: str,
    eager: dict[int, Record],
    graphed: dict[int, Record],
) -> None:
    """They are not reported as training that is not deterministic."""
    for rank in graphed.values():
        rank["captures"] = [capture(2)]
        rank["steps"][0]["grad_norm"] = 9.0
        change(rank)
    result = compare(eager, graphed)
    assert result.status == NOT_COMPARABLE and not result.values
    assert result.reason == f"the eager run and the graph run have different setups: {where}"


def test_another_number_of_ranks_is_not_comparable(eager: dict[int, Record]) -> None:
    alone = {0: make_rank({"captured": 1, "replayed": 1})}
    result = compare(eager, alone)
    assert result.status == NOT_COMPARABLE and "ranks: world_size 2 and 1" in result.reason


def test_another_version_of_this_package_changes_no_number_of_an_eager_run(
    eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    for rank in eager.values():
        rank["versions"]["megatron-cg"] = "0.0.1"
    assert compare(eager, graphed).status == IDENTICAL


def test_a_rank_that_both_runs_lack_is_missed(
    eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    del eager[1], graphed[1]
    result = compare(eager, graphed)
    assert result.status == FAILED
    assert result.reason == "the eager run has records of 1 of its 2 ranks, none of 1"


def test_of_many_missing_ranks_the_first_are_named() -> None:
    run = {0: make_rank(world_size=2**40), 2: make_rank(rank=2, world_size=2**40)}
    assert missing_ranks(run).endswith("none of 1, 3, 4, 5, 6, 7, ...")


def test_labels_say_which_run_is_which(
    eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    change_norm(graphed)
    reason = compare(eager, graphed, ("b (eager)", "a (graphs)")).reason
    assert "1.28571428571428" in reason and " in b (eager), 1.2857142857142" in reason
    assert " in a (graphs)" in reason


def test_a_difference_to_a_run_that_had_graphs_by_then_is_no_matter_of_determinism(
    eager: dict[int, Record], graphed: dict[int, Record]
) -> None:
    for rank in (*eager.values(), *graphed.values()):
        rank["captures"] = [capture(2)]
    change_norm(graphed)
    for rank in graphed.values():
        rank["steps"][0]["grad_norm"] = 9.0
    assert "still eager" not in compare(eager, graphed).reason
