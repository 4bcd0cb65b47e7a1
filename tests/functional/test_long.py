"""Ten thousand steps, with evaluation, checkpoints and three more captures; only when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.life_cases import LIFE

SCRIPT = Path(__file__).with_name("tampered.py")
SECONDS = 1_800.0
LAYERS, WARMUP = 2, 3
CAPTURED = (2_000, 4_500, 7_500)


@pytest.mark.skipif(
    os.environ.get("MEGATRON_CG_LONG") != "1", reason="takes ten minutes; set MEGATRON_CG_LONG=1"
)
def test_ten_thousand_steps_are_bit_equal(align: Callable[..., Outcome]) -> None:
    case = LIFE["long"]
    mutation = "again@" + ",".join(map(str, CAPTURED))
    outcome = align(case, script=SCRIPT, mutation=mutation, timeout=SECONDS)
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert len({value.step for value in comparison.values}) == case.steps
    evaluated = {v.step for v in comparison.values if v.name.startswith("evaluation ")}
    assert evaluated == set(range(1000, case.steps + 1, 1000))
    assert outcome.graphed is not None
    starts = (WARMUP + 1, *CAPTURED, case.steps + 1)
    for rank in outcome.graphed.values():
        sessions = rank["sessions"]
        replayed = [LAYERS * (end - start) for start, end in pairwise(starts)]
        assert [counts["replayed"] for counts in sessions] == replayed
        assert all(counts["captured"] == LAYERS and counts["eager"] > 0 for counts in sessions)
