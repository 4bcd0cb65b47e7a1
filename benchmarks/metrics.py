"""From the records of two runs to the metrics of each rank. Pure.

Note [What a share is a share of]
    A rank's cost is the mean over the counted steps, so that a rare long wait is in it; the step
    is the median of ``train_step``'s time, so that a rare long step does not make the share look
    small. Votes are made between two steps and are not in ``train_step``'s time; guards are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.probe import KEY
from megatron_cg.errors import MegatronCGError
from megatron_cg.telemetry.record_schema import CAPTURED_AFTER


class MetricsError(MegatronCGError):
    """The runs show nothing of what replays cost."""


@dataclass(frozen=True)
class Spread:
    """Of one value a step, over the counted steps."""

    mean: float
    median: float
    p95: float
    """Nineteen of twenty steps are not above it."""


@dataclass(frozen=True)
class RankMetrics:
    """One rank's steps with graphs; times are host time, shares as in the module's note."""

    rank: int
    steps: int
    """How many were counted."""
    step_ms: Spread
    replays: float
    """Replays a step: one for each graphed layer and microbatch."""
    guard_us: Spread
    """A step's guards, before forward and backward replays."""
    around_us: Spread
    """What else a replay takes: its inputs counted, its backward pass given a guard."""
    guard_us_per_replay: float
    """Both of these."""
    vote_us: Spread
    """All that was done about votes after a step."""
    issuing_us: Spread
    """Of which posting this step's vote."""
    waiting_us: Spread
    """Of which waiting for the other ranks' votes of the step before."""
    guard_share: float
    vote_share: float
    share: float
    """Guards and votes together."""
    tensors_copied: float
    """Inputs a replay that were copied into the graph's own memory."""
    tensors_in_place: float
    bytes_copied: float
    mismatched: int
    votes_waited_for: tuple[Mapping[str, Any], ...]
    """Votes at capture: ``kind``, ``waiting_ms``, ``exchanging_ms``."""


def metrics(record: Mapping[str, Any], settle: int) -> RankMetrics:
    """One rank's metrics from its record of the run with graphs.

    Args:
        record: as the recorder wrote it, under a probe.
        settle: steps after capture that are left out.

    Raises MetricsError when no step is left to count, or not every one of them replayed.
    """
    first = first_counted(record, settle)
    probed = record[KEY]["steps"]
    times = [step["milliseconds"] for step in record["steps"]]
    if len(probed) != len(times):
        raise MetricsError(
            f"rank {record['rank']} trained {len(times)} steps and voted after {len(probed)}: the "
            "votes cannot be told apart by step."
        )
    rows, times = probed[first:], times[first:]
    counters = [row["counters"] for row in rows]
    if not all(counted is not None and counted["replayed"] > 0 for counted in counters):
        raise MetricsError(
            f"rank {record['rank']} has steps without a replay after step {first}: nothing is "
            "known of what a replay costs. The run's log says why (megatron_cg: no replay of ...)."
        )
    replayed = sum(counted["replayed"] for counted in counters)
    guard = [counted["guard_ns"] / 1e3 for counted in counters]
    around = [counted["around_ns"] / 1e3 for counted in counters]
    step, vote = spread(times), spread([row["vote_ms"] * 1e3 for row in rows])
    guard_mean = statistics.fmean(guard) + statistics.fmean(around)
    guard_share, vote_share = (mean / (step.median * 1e3) for mean in (guard_mean, vote.mean))
    return RankMetrics(
        rank=record["rank"],
        steps=len(times),
        step_ms=step,
        replays=replayed / len(times),
        guard_us=spread(guard),
        around_us=spread(around),
        guard_us_per_replay=(sum(guard) + sum(around)) / replayed,
        vote_us=vote,
        issuing_us=spread([row["issuing_ms"] * 1e3 for row in rows]),
        waiting_us=spread([row["waiting_ms"] * 1e3 for row in rows]),
        guard_share=guard_share,
        vote_share=vote_share,
        share=guard_share + vote_share,
        tensors_copied=sum(counted["inputs_copied"] for counted in counters) / replayed,
        tensors_in_place=sum(counted["inputs_in_place"] for counted in counters) / replayed,
        bytes_copied=sum(counted["bytes_copied"] for counted in counters) / replayed,
        mismatched=sum(counted["mismatched"] for counted in counters),
        votes_waited_for=tuple(record[KEY]["votes"]),
    )


def first_counted(record: Mapping[str, Any], settle: int) -> int:
    """How many steps come before the first that counts. Raises MetricsError where none is left."""
    captured, steps = record.get(CAPTURED_AFTER), len(record["steps"])
    if captured is None:
        raise MetricsError(
            f"rank {record['rank']} captured no graphs: there is no replay to count."
        )
    first = int(captured) + settle
    if first >= steps:
        raise MetricsError(
            f"of {steps} steps none is left after {captured} of warmup and {settle} that settle: "
            "give more --steps or fewer --settle."
        )
    return first


def step_times(record: Mapping[str, Any], first: int) -> Spread:
    """Milliseconds of the steps from index ``first``."""
    return spread([step["milliseconds"] for step in record["steps"][first:]])


def spread(values: Sequence[float]) -> Spread:
    """Mean, median and 95th percentile of one or more values."""
    ordered = sorted(values)
    # The nearest rank: a value that occurred, also of a few.
    p95 = ordered[-(-len(ordered) * 95 // 100) - 1]
    return Spread(statistics.fmean(ordered), statistics.median(ordered), p95)
