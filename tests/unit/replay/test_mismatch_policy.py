"""What follows a mismatch, and a replay that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.attach import replay_instead
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy
from tests.unit.counted import expect

SHAPE = Mismatch("shape", "shape of argument x", "(2,)", "(3,)", "Cause.")


def policy_after(*layers: str, fresh: bool = False, again: bool = False, **policy: Any) -> Any:
    """A policy after mismatches of these layers."""
    mismatches = MismatchPolicy(ReplayPolicy(**policy), Counters())
    mismatches.captured_again = again
    for layer in layers:
        mismatches.mismatched(SHAPE, layer, collectives=False, fresh=fresh)
    return mismatches


def test_a_mismatch_is_counted_each_time_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mismatches = policy_after("layer 0", "layer 0", "layer 1")
    expect(mismatches.counters, mismatched=3)
    assert [r.getMessage().rpartition(": shape")[0] for r in caplog.records] == [
        "megatron_cg: no replay of layer 0",
        "megatron_cg: no replay of layer 1",
    ]
    assert not mismatches.wants_recapture


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_recapture_is_asked_for_unless_the_last_one_did_not_help(
    fresh: bool, again: bool
) -> None:
    asked = policy_after("layer 0", fresh=fresh, again=again, on_mismatch="recapture")
    assert asked.wants_recapture is not (fresh and again)


def test_error_ends_the_run() -> None:
    with pytest.raises(ReplayMismatchError, match=r"layer 0: .*--cg-on-mismatch error"):
        policy_after("layer 0", on_mismatch="error")


@pytest.mark.parametrize(("interval", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_verification_is_due_at_its_interval(interval: int, due: list[int]) -> None:
    mismatches = policy_after(verify_interval=interval)
    found = []
    for step in range(1, 7):
        mismatches.begin_step()
        found += [step] * mismatches.verifies
    assert found == due


def test_gathers_that_wait_for_a_replay_are_issued_if_it_raises() -> None:
    """Other ranks wait in them."""
    layer: Any = nn.Linear(1, 1)
    layer.cuda_graphs = [SimpleNamespace(eager_passes=SimpleNamespace(replay_follows=list))]
    issued: list[str] = []
    mismatches: Any = SimpleNamespace(issue_held=lambda: issued.append("gathers"))
    results = iter(["replayed"])
    undo = replay_instead(layer, lambda args, kwargs: lambda: next(results), mismatches)
    assert layer(1) == "replayed" and not issued
    with pytest.raises(StopIteration):
        layer(1)
    assert issued == ["gathers"]
    undo()
