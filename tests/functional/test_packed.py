"""Packed sequences: attention is eager, on any lengths, and the MLP replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_cg.tools.align.outcome import Outcome
from tests.functional.cases import DENSE, Case, batch

SCRIPT = Path(__file__).with_name("tampered.py")
PACKED = Case(
    "packed",
    DENSE,
    ("mlp",),
    ("--micro-batch-size", "1", *batch(4)),
    env=(("MEGATRON_CG_SCENARIO", "pack"),),
)


def test_losses_norms_and_shards_are_those_of_eager(
    align: Callable[..., Outcome], log: Callable[..., str]
) -> None:
    outcome = align(PACKED, script=SCRIPT)
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert comparison.graphs["replayed"] > 0 and comparison.graphs["mismatched"] == 0
    assert "packed: " in log(PACKED)


def test_packs_are_not_trained_as_whole_sequences(align: Callable[..., Outcome]) -> None:
    """Otherwise the comparison above would say nothing about packs."""
    packed, whole = (
        align(case, script=SCRIPT) for case in (PACKED, replace(PACKED, name="whole", env=()))
    )
    losses = [[v.eager for v in found.comparison.values] for found in (packed, whole)]
    assert losses[0] != losses[1]
