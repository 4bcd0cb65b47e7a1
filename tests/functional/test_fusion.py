"""Graphs train bit for bit as eager training with gradient-accumulation fusion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.cases import CASES, Case
from tests.functional.life_cases import LIFE

SCRIPT = Path(__file__).with_name("fused.py")
FUSED = [LIFE["dense"], LIFE["moe"]]
FUSED += [
    case for case in CASES if case.name in ("zero2", "fp8-delayed", "native-moe", "dropless-ep1")
]


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_losses_norms_and_shards_are_those_of_eager_fusion(
    case: Case, align: Callable[..., Outcome]
) -> None:
    outcome = align(replace(case, name=f"{case.name}-fusion"), script=SCRIPT)
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert len({value.step for value in comparison.values}) == case.steps
    assert comparison.graphs["replayed"] > 0
    for run in (outcome.eager, outcome.graphed):
        assert run is not None and all(record["fused"] > 0 for record in run.values())
