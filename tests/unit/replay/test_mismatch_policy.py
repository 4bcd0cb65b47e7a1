"""What follows a mismatch, and a replay that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron_cg.replay.attach import replay_instead
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy

SHAPE = Mismatch("shape", "shape of argument x", "(2,)", "(3,)", "Cause.")


@pytest.mark.parametrize(("fresh", "again"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_recapture_is_asked_for_unless_the_last_one_did_not_help(fresh: int, again: int) -> None:
    mismatches = MismatchPolicy(ReplayPolicy("recapture"), Counters())
    mismatches.captured_again = bool(again)
    mismatches.mismatched(SHAPE, "layer 0", collectives=False, fresh=bool(fresh))
    assert mismatches.wants_recapture is (not fresh or not again)


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
