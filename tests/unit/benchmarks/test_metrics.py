"""Records of a run become metrics; what shows nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.metrics import MetricsError, Spread, first_counted, metrics, spread, step_times
from benchmarks.probe import KEY
from benchmarks.report import Measurement, as_markdown

COUNTERS = {
    "replayed": 3,
    "guard_ns": 30_000,
    "around_ns": 6_000,
    "inputs_copied": 6,
    "inputs_in_place": 3,
    "bytes_copied": 3000,
    "mismatched": 0,
}
VOTE = {"kind": "capture start", "waiting_ms": 2.0, "exchanging_ms": 0.5}


def record(steps: int = 8, captured: int | None = 2, **counters: int) -> dict[str, Any]:
    """Steps of 10, 11, ... ms, whose votes take 0.1 ms; a first one after capture that takes 50."""
    times = [50.0 if step == captured else 10.0 + step for step in range(steps)]
    early = {"vote_ms": 9.0, "issuing_ms": 9.0, "waiting_ms": 9.0, "counters": None}
    late = {"vote_ms": 0.1, "issuing_ms": 0.03, "waiting_ms": 0.05}
    late["counters"] = COUNTERS | counters  # type: ignore[assignment]
    rows = [dict(early if step < (captured or 0) else late) for step in range(steps)]
    made = {"rank": 1, "steps": [{"milliseconds": time} for time in times]}
    if captured is not None:
        made["captured_after_step"] = captured
    return made | {KEY: {"steps": rows, "votes": [VOTE]}}


def test_steps_before_capture_and_the_first_after_it_are_not_counted() -> None:
    found = metrics(record(), settle=1)
    assert (found.rank, found.steps) == (1, 5)
    assert found.step_ms == Spread(mean=15.0, median=15.0, p95=17.0)
    assert first_counted(record(), 1) == 3
    assert step_times(record(), 3) == found.step_ms


def test_costs_are_by_step_by_replay_and_as_a_share() -> None:
    found = metrics(record(), settle=1)
    assert found.replays == 3
    assert (found.guard_us.mean, found.around_us.mean, found.guard_us_per_replay) == (30, 6, 12)
    assert found.vote_us.mean == pytest.approx(100)
    assert (found.issuing_us.median, found.waiting_us.p95) == pytest.approx((30, 50))
    assert found.guard_share == pytest.approx(36 / 15_000)
    assert found.vote_share == pytest.approx(100 / 15_000)
    assert found.share == pytest.approx(136 / 15_000)
    assert (found.tensors_copied, found.tensors_in_place, found.bytes_copied) == (2, 1, 1000)
    assert found.votes_waited_for == (VOTE,)


def test_a_rare_long_vote_counts_and_a_rare_long_step_does_not() -> None:
    slow = record(30)
    slow["steps"][20]["milliseconds"] = 1e6
    slow[KEY]["steps"][21]["vote_ms"] = 100.0
    found = metrics(slow, settle=1)
    assert found.step_ms.median < 40 and found.vote_us.median == pytest.approx(100)
    assert found.vote_us.mean > 3000 and found.vote_share > 0.08


@pytest.mark.parametrize(
    ("made", "settle", "words"),
    [
        (record(captured=None), 0, "captured no graphs"),
        (record(), 6, "of 8 steps none is left after 2 of warmup and 6 that settle"),
        (record(replayed=0), 0, "steps without a replay"),
    ],
)
def test_what_shows_nothing_is_refused(made: dict[str, Any], settle: int, words: str) -> None:
    with pytest.raises(MetricsError, match=words):
        metrics(made, settle)


def test_steps_and_votes_that_do_not_pair_are_refused() -> None:
    odd = record()
    odd[KEY]["steps"].pop()
    with pytest.raises(MetricsError, match="trained 8 steps and voted after 7"):
        metrics(odd, 0)


@pytest.mark.parametrize(
    ("values", "p95"), [([5.0], 5.0), (list(range(20)), 18.0), (list(range(1, 101)), 95.0)]
)
def test_the_percentile_is_a_value_that_occurred(values: list[float], p95: float) -> None:
    assert spread(values).p95 == p95


@pytest.mark.parametrize(("vote_ms", "word"), [(0.1, "under"), (1.0, "over")])
def test_the_report_names_machine_versions_and_the_rank_that_costs_most(
    vote_ms: float, word: str
) -> None:
    costly = record()
    for row in costly[KEY]["steps"]:
        row["vote_ms"] = vote_ms
    ranks = (metrics(record() | {"rank": 0}, 1), metrics(costly, 1))
    machine = {"gpus": ["H200", "H200"], "driver": "580.1", "processor": "a CPU"}
    measurement = Measurement({}, machine, {"torch": "2.11"}, Spread(30.0, 30.0, 30.0), ranks)
    text = as_markdown("Title", measurement)
    assert "Machine: 2 x H200, driver 580.1. torch 2.11." in text
    assert "| eager step / step with graphs | 2.000 |  |" in text
    assert f"{word} the target of 1%" in text
    assert measurement.share == ranks[1].share
    data = measurement.as_json()
    assert data["schema"] == {"name": "megatron_cg.overheads", "version": 1}
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
