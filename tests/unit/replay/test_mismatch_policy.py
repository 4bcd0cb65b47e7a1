"""What follows a mismatch."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy
from tests.unit.counted import expect

SHAPE = Mismatch("shape", "shape of argument x", "(2,)", "(3,)", "Cause.")


def found(mismatches: MismatchPolicy, **options: Any) -> None:
    mismatches.mismatched(SHAPE, "layer 0", **{"collectives": False, "fresh": False, **options})


def test_a_mismatch_is_counted_each_time_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mismatches = MismatchPolicy(ReplayPolicy(), Counters())
    for layer in ("layer 0", "layer 0", "layer 1"):
        mismatches.mismatched(SHAPE, layer, collectives=False, fresh=False)
    expect(mismatches.counters, mismatched=3)
    assert [r.getMessage().rpartition(": shape")[0] for r in caplog.records] == [
        "megatron_cg: no replay of layer 0",
        "megatron_cg: no replay of layer 1",
    ]
    assert not mismatches.wants_recapture


def test_a_recapture_is_asked_for_unless_the_last_one_did_not_help() -> None:
    mismatches = MismatchPolicy(ReplayPolicy("recapture"), Counters())
    mismatches.captured_again = True
    found(mismatches, fresh=True)
    assert not mismatches.wants_recapture
    found(mismatches)
    assert mismatches.wants_recapture


def test_the_first_capture_is_followed_by_another_one() -> None:
    mismatches = MismatchPolicy(ReplayPolicy("recapture"), Counters())
    found(mismatches, fresh=True)
    assert mismatches.wants_recapture


def test_error_ends_the_run() -> None:
    with pytest.raises(ReplayMismatchError, match=r"layer 0: .*--cg-on-mismatch error"):
        found(MismatchPolicy(ReplayPolicy("error"), Counters()))


def test_verification_of_every_step_is_due_in_every_step() -> None:
    mismatches = MismatchPolicy(ReplayPolicy(verify_interval=1), Counters())
    for _ in range(3):
        mismatches.begin_step()
        assert mismatches.verifies


def test_verification_is_due_at_its_interval() -> None:
    mismatches = MismatchPolicy(ReplayPolicy(verify_interval=3), Counters())
    due = []
    for _ in range(7):
        mismatches.begin_step()
        due.append(mismatches.verifies)
    assert due == [False, False, True, False, False, True, False]
    never = MismatchPolicy(ReplayPolicy(), Counters())
    never.begin_step()
    assert not never.verifies
