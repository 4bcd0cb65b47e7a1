"""Rounds are joined, and ratios are those within a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from megatron_cg.tools.bench.results.bench_plots import write_pngs
from megatron_cg.tools.bench.results.comparing import compare
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.metrics import Row, joined, tables
from megatron_cg.tools.bench.results.rounds import Ratio, later_per_earlier, ratio
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.runs.configurations import DDP_GRAPHS, EAGER, GRAPHS
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT

Make = Callable[..., dict[str, Any]]
MIB = 2**20


def without_steps(results: list[dict[str, Any]], configuration: str, number: int) -> None:
    """Take a run's metrics away, as if the budget had ended before it."""
    for result in results:
        if (result["key"]["contender"], result["key"]["round"]) == (configuration, number):
            result |= {
                "ranks": [],
                "device_trace": None,
                "trace": None,
                "status": LEFT_OUT,
                "error": "no time",
            }


def numbers(found: Ratio | None) -> tuple[float, ...]:
    """Median, least, greatest, and in how many rounds."""
    assert found
    return found.median, found.least, found.most, found.rounds


def table(results: list[dict[str, Any]]) -> dict[str, Row]:
    (rows,) = tables(results)
    return {row.name: row for row in rows}


def test_step_times_are_those_of_all_rounds(drifting: list[dict[str, Any]]) -> None:
    graphs = table(drifting)[GRAPHS].metrics
    # 90 100 110 110 110 110 180 180 180: quarters at places 2, 4 and 6 of 0 to 8.
    assert (graphs["step"], graphs["quartiles"]) == (110, [110, 180])
    assert (graphs["least"], graphs["most"], graphs["medians"]) == (90, 180, [100, 180, 110])
    # Of the first round, which alone was traced: 110 / 50.
    assert graphs["busy"] == 50.0 and graphs["step_per_busy"] == pytest.approx(2.2)
    assert graphs["device_alone"]


def test_ratios_are_medians_of_those_within_a_round(drifting: list[dict[str, Any]]) -> None:
    rows = table(drifting)
    found = numbers(rows[GRAPHS].step_ratio(rows[EAGER]))
    assert found == pytest.approx((0.55, 0.5, 0.6, 3))
    # 1.0, 1.2, 0.91667: neither was faster in all rounds.
    found = numbers(rows[GRAPHS].step_ratio(rows[DDP_GRAPHS]))
    assert found == pytest.approx((1.0, 11 / 12, 1.2, 3))
    # The medians of all steps would have said 110 / 120.
    of_all = [rows[name].metrics["step"] for name in (GRAPHS, DDP_GRAPHS)]
    assert of_all == [110, 120]


def test_an_even_drift_cancels_in_two_rounds(result: Make) -> None:
    # Both take 100 ms, and every run is 1 ms a step slower than the one before: A B, B A.
    runs = [
        result(name, (100.0 + place,) * 3, round=number)
        for place, (number, name) in enumerate([(1, EAGER), (1, GRAPHS), (2, GRAPHS), (2, EAGER)])
    ]
    rows = table(runs)
    found = numbers(rows[GRAPHS].step_ratio(rows[EAGER]))
    assert found == pytest.approx(((1.01 + 102 / 103) / 2, 102 / 103, 1.01, 2))
    assert found[0] == pytest.approx(1, abs=2e-4)


def test_steps_that_grow_are_told_from_steady_ones(result: Make) -> None:
    steady, grows = (100.0, 104.0) * 4, (100.0,) * 4 + (130.0,) * 4
    for rounds, expected in (
        ([steady], 1.0),
        ([grows], 1.3),
        ([steady, grows], 1.15),
        # Too few to halve, and an odd number, whose middle one is of the later half.
        ([(100.0,) * 3 + (200.0,) * 4], None),
        ([grows, (1.0, 2.0)], 1.3),
        ([(*grows, 131.0)], 1.3),
    ):
        runs = [result(GRAPHS, steps, round=n) for n, steps in enumerate(rounds, 1)]
        found = later_per_earlier(runs)
        assert found == (pytest.approx(expected) if expected else None)
        assert joined(runs)["later_per_earlier"] == found


def test_configurations_that_were_not_run_side_by_side_have_no_round_in_common(
    result: Make, drifting: list[dict[str, Any]]
) -> None:
    alone = [result(GRAPHS, (50.0,) * 3, round=n, invocation="other") for n in (1, 2)]
    eager = drifting[:3]
    # All steps of eager have the median 200.
    found = ratio(alone, eager)
    assert found == Ratio(0.25, 0.25, 0.25, 0) and not found.side_by_side


def test_a_round_that_lacks_a_configuration_counts_for_the_others(
    drifting: list[dict[str, Any]],
) -> None:
    without_steps(drifting, DDP_GRAPHS, 2)
    rows = table(drifting)
    found = numbers(rows[GRAPHS].step_ratio(rows[EAGER]))
    assert found == pytest.approx((0.55, 0.5, 0.6, 3))
    assert rows[GRAPHS].metrics["medians"] == [100, 180, 110]
    found = numbers(rows[GRAPHS].step_ratio(rows[DDP_GRAPHS]))
    assert found == pytest.approx((23 / 24, 11 / 12, 1.0, 2))
    assert rows[DDP_GRAPHS].metrics["medians"] == [100, 120]


def test_a_configuration_that_never_ran_is_in_no_ratio(drifting: list[dict[str, Any]]) -> None:
    for number in (1, 2, 3):
        without_steps(drifting, DDP_GRAPHS, number)
    rows = table(drifting)
    assert rows[DDP_GRAPHS].step_ratio(rows[EAGER]) is None
    assert numbers(rows[GRAPHS].step_ratio(rows[EAGER]))[3] == 3
    text = as_markdown(drifting)
    assert "| ddp-graphs (left out) | - | - |" in text
    assert text.count("ddp-graphs left out: no time") == 1


def test_without_a_round_in_common_there_is_no_ratio(drifting: list[dict[str, Any]]) -> None:
    two = [result for result in drifting if result["key"]["round"] < 3]
    without_steps(two, EAGER, 1)
    without_steps(two, GRAPHS, 2)
    rows = table(two)
    assert rows[GRAPHS].step_ratio(rows[EAGER]) is None
    assert numbers(rows[GRAPHS].step_ratio(rows[DDP_GRAPHS])) == (1.0, 1.0, 1.0, 1)


def test_a_run_that_failed_after_its_timed_steps_counts(
    drifting: list[dict[str, Any]],
) -> None:
    drifting[0] |= {"status": FAILED, "error": "gone"}
    rows = table(drifting)
    assert numbers(rows[GRAPHS].step_ratio(rows[EAGER]))[3] == 3


def test_memory_is_the_most_of_any_round_and_capture_their_median(result: Make) -> None:
    runs = [result(GRAPHS, round=number) for number in (1, 2, 3)]
    for made, peak, seconds in zip(runs, (3000, 5000, 4000), (5.0, 7.0, 6.5), strict=True):
        rank = made["ranks"][0]
        memory = rank["timed"]["memory"] | {"peak_allocated": peak * MIB}
        capture = rank["captures"][0] | {"seconds": seconds}
        rank |= {"timed": rank["timed"] | {"memory": memory}, "captures": [capture]}
    found = joined(runs)
    assert (found["peak_allocated"], found["capture_seconds"]) == (5000, 6.5)
    assert found["capture_without_warmup"] == 3.0


def test_one_round_of_three_configurations_is_a_matrix_with_a_warning(result: Make) -> None:
    three = [result(EAGER, (200.0,) * 3), result(GRAPHS), result(DDP_GRAPHS, (204.0,) * 3)]
    rows = table(three)
    assert rows[GRAPHS].step_ratio(rows[EAGER]) == Ratio(0.51, 0.51, 0.51, 1)
    text = as_markdown(three)
    assert "| fsdp-graphs | 0.510 | - | 0.500 |" in text and "`--rounds`" in text
    assert "of each round" not in text and "| run | grouped GEMM | made in |" in text
    assert "against each other" not in as_markdown(three[:2])


def test_scaling_and_comparing_take_all_rounds_together(
    result: Make, drifting: list[dict[str, Any]]
) -> None:
    grown = [
        result(
            GRAPHS, (10.0 * layers + number,) * 3, layers=layers, dimension="layers", round=number
        )
        for layers in (4, 8)
        for number in (1, 2, 3)
    ]
    step = next(trend for trend in trends(grown) if trend.metric == "step")
    assert step.points == ((4, 42), (8, 82))
    changes = compare([result(GRAPHS, (220.0,) * 3)], drifting)
    (change,) = (change for change in changes if change.metric == "step ms")
    assert (change.name, change.old, change.new) == (
        "llama.default.8layers-2mb-2gpus.fsdp-graphs",
        220.0,
        110.0,
    )


def test_a_picture_shows_each_round(
    drifting: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_steps(drifting, EAGER, 1)
    ticks = []
    monkeypatch.setattr(Axes, "plot", lambda _axes, xs, ys, *_, **__: ticks.append((xs, ys)))
    path, *_ = write_pngs(drifting, [], tmp_path)
    assert path.name == "llama.default.8layers-2mb-2gpus.step.png"
    # Those of the steps, and none of GPU busy.
    assert [list(xs) for xs, _ in ticks[:3]] == [[300, 200], [100, 180, 110], [100, 150, 120]]
    assert not any(len(xs) for xs, _ in ticks[3:])


def test_a_row_is_of_its_first_round(drifting: list[dict[str, Any]]) -> None:
    row = table(drifting[::-1])[GRAPHS]
    assert [result["key"]["round"] for result in row.rounds] == [1, 2, 3]
    assert row.result is row.rounds[0] and row.same_invocation
