"""Whether graphs pay is taken from measured rows, and is unknown where none is near."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_cg.tools.plan.worth import (
    FAR,
    LIKELY,
    UNKNOWN,
    UNLIKELY,
    Planned,
    worth,
)

PLANNED = Planned("dense", "BF16", "default", 100.0, frozenset({"attn", "mlp"}), True, 1234)


def row(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "results": "bench-1",
        "began": "2026-01-01",
        "shape": "a-model",
        "kind": "dense",
        "dtype": "BF16",
        "grouped_gemm": "default",
        "gpus": "2 x a GPU",
        "scopes": ["attn", "mlp"],
        "ratio": 0.6,
        "least": 0.5,
        "most": 0.7,
        "rounds": 3,
        "same_cache": True,
        "work_per_layer": 100.0,
    }
    return made | changes


def test_a_near_row_of_the_same_kind_tells() -> None:
    found = worth(PLANNED, [row(), row(shape="far", work_per_layer=300.0, ratio=2.0)])
    assert found["verdict"] == LIKELY and found["row"] == row()
    assert found["text"] == (
        "Graphs are likely to pay. Nearest measured row: a-model on 2 x a GPU, 0.60 of an eager "
        "step (0.50 to 0.70 in 3 rounds; bench-1, 2026-01-01). A layer here has 1 times its work, "
        "and graphs save 1,234 kernel launches a step. megatron-cg bench measures it on your GPUs."
    )
    one = worth(PLANNED, [row(rounds=1, same_cache=False)])
    assert "(one round, cuBLASLt's cache perhaps larger with graphs; bench-1" in one["text"]


@pytest.mark.parametrize("times", [1.01 / FAR, 0.99 * FAR, 0.99 / FAR, 1.01 * FAR])
def test_beyond_a_factor_it_is_unknown(times: float) -> None:
    found = worth(replace(PLANNED, work_per_layer=100.0 * times), [row()])
    near = 1 / FAR <= times <= FAR
    assert found["verdict"] == (LIKELY if near else UNKNOWN)
    assert ("beyond a factor of 4" in found["text"]) is not near


@pytest.mark.parametrize(
    "changes", [{"kind": "MoE"}, {"dtype": "FP8"}, {"grouped_gemm": "cutlass"}, {"kind": "hybrid"}]
)
def test_a_row_of_another_kind_tells_nothing(changes: dict[str, str]) -> None:
    found = worth(replace(PLANNED, **changes), [row()])  # type: ignore[arg-type]
    assert found["verdict"] == UNKNOWN and found["row"] is None
    assert next(iter(changes.values())) in found["text"] and "was measured" in found["text"]


def test_rounds_decide() -> None:
    assert worth(PLANNED, [row(least=0.97, most=1.1)])["verdict"] == UNLIKELY
    assert worth(PLANNED, [row(least=0.9, most=1.1)])["verdict"] == UNKNOWN


def test_what_is_not_captured_here_is_told_and_attention_is_needed() -> None:
    less = worth(replace(PLANNED, scopes=frozenset({"attn"})), [row()])
    assert less["verdict"] == LIKELY and "captured mlp too, so expect less" in less["text"]
    whole = worth(replace(PLANNED, scopes=frozenset({"layer"})), [row()])
    assert "expect less" not in whole["text"]
    without = worth(replace(PLANNED, attention=False), [row()])
    assert without["verdict"] == UNKNOWN and "attention of every layer" in without["text"]
