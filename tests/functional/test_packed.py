"""Packed sequences: graphs of attention take their boundaries, and other graphs need none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.cases import (
    DENSE,
    EP2,
    EXPERTS,
    MLA,
    MOE,
    NATIVE,
    PREPROCESS,
    TENSOR_PARALLEL,
    TORCH_GEMM,
    Case,
    batch,
)
from tests.functional.tampering.packs import STARTS

SCRIPT = Path(__file__).with_name("tampered.py")
MOST = ("--cg-pack-sequences", str(max(map(len, STARTS))))


def _packed(
    name: str, preset: str, scopes: tuple[str, ...], *flags: str, graph_flags: tuple[str, ...] = ()
) -> Case:
    return Case(
        f"packed-{name}",
        preset,
        scopes,
        ("--micro-batch-size", "1", *batch(4), *flags),
        graph_flags=graph_flags,
        env=(("MEGATRON_CG_SCENARIO", "pack"),),
    )


ATTENTION = _packed("attention", DENSE, ("attn", "mlp"), *MOST)
CASES = [
    _packed("mlp", DENSE, ("mlp",)),
    ATTENTION,
    _packed("whole-layers", DENSE, (), *MOST),
    _packed("native", DENSE, ("attn", "mlp"), *MOST, graph_flags=NATIVE),
    _packed("tp2", DENSE, ("attn", "mlp"), *MOST, *TENSOR_PARALLEL),
    _packed("moe", MOE, PREPROCESS, *MOST, *EP2),
    _packed("latent", MLA, PREPROCESS, *MOST),
    _packed("experts", MOE, EXPERTS, *MOST, *EP2, graph_flags=TORCH_GEMM),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_norms_and_shards_are_those_of_eager(
    case: Case, align: Callable[..., Outcome], log: Callable[..., str]
) -> None:
    outcome = align(case, script=SCRIPT)
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert comparison.graphs["replayed"] > 0
    assert comparison.graphs["mismatched"] == comparison.graphs["eager"] == 0
    assert "packed: " in log(case)


def test_packs_are_not_trained_as_whole_sequences(align: Callable[..., Outcome]) -> None:
    """Otherwise the comparison above would say nothing about packs."""
    whole = replace(ATTENTION, name="whole", env=())
    packed, plain = (align(case, script=SCRIPT).comparison.values for case in (ATTENTION, whole))
    assert [value.eager for value in packed] != [value.eager for value in plain]
