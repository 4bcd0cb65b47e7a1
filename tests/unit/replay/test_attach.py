"""What runs instead of a unit's forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron_cg.replay.eager_passes import replay_instead


def test_gathers_that_wait_for_a_replay_are_issued_if_it_raises() -> None:
    """Other ranks wait in them."""
    layer: Any = nn.Linear(1, 1)
    layer.cuda_graphs = [SimpleNamespace(eager_passes=SimpleNamespace(replay_follows=list))]
    issued: list[str] = []
    mismatches: Any = SimpleNamespace(issue_held=lambda: issued.append("gathers"))
    failure: list[Exception] = []

    def replay() -> str:
        if failure:
            raise failure[0]
        return "replayed"

    undo = replay_instead(layer, lambda args, kwargs: replay, mismatches)
    assert layer(1) == "replayed" and not issued
    failure.append(ValueError("no replay"))
    with pytest.raises(ValueError, match="no replay"):
        layer(1)
    assert issued == ["gathers"]
    undo()
