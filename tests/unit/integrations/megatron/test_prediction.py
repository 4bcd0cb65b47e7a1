"""What a prediction layer that runs several times needs of the fast path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.arguments.fast_path_parts import NEEDS, PARTS
from megatron_cg.integrations.megatron.prediction import parts_for

REPEATED: dict[str, Any] = {
    "mtp_num_layers": 2,
    "mtp_use_repeated_layer": True,
    "recompute_granularity": "full",
}


def parts(fast_path: Any = True, **changes: Any) -> frozenset[str]:
    return parts_for(SimpleNamespace(**REPEATED | changes), fast_path)


def test_runs_that_end_one_by_one_keep_weights_attached() -> None:
    assert parts() == frozenset(PARTS) - {"detached-weights"}
    assert parts(("swap", "gradients", "unshard", "detached-weights")) == {
        *("swap", "gradients", "unshard"),
    }
    assert not any("detached-weights" in needs for needs in NEEDS.values())


@pytest.mark.parametrize(
    "change",
    [
        {"mtp_num_layers": 1},
        {"mtp_use_repeated_layer": False},
        {"recompute_granularity": None},
        {"recompute_granularity": "selective"},
    ],
)
def test_other_models_have_the_chosen_parts(change: dict[str, Any]) -> None:
    assert parts(**change) == frozenset(PARTS)
    assert parts(fast_path=False, **change) == frozenset()
