"""No fault passes silently, and no clause of the guard is there in vain."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.replay.guard.faults import FAULTS, Case, layer_of, switched_off
from tests.unit.trainers import trainer_of

BEFORE, AFTER = 2, 2


class Numeric(TapeBackend):
    """The tape with a state of numerics, as TE has one of FP8."""

    recipe = "none"

    def numerics(self) -> Any:
        return self.recipe

    def captured_numerics(self, index: int, options: Any) -> Any:
        return "none"


def train(case: Case, graphs: bool) -> tuple[list[tuple[float, float]], Any]:
    """Losses and norms of some steps, the fault in their middle; and the session's counters."""
    model = CpuModelConfig(
        layers=2,
        graph_modules=case.scopes,
        experts=case.experts,
        dropout=0.1,
        bf16=False,
        options=case.options,
    )
    with trainer_of(model, graphs=graphs) as trainer:
        trainer.backend = Numeric()
        layer_of(trainer).self_attention.register_buffer("mark", torch.ones(2))
        layer_of(trainer).self_attention.note = torch.ones(2)
        numbers = [trainer.step() for _ in range(case.warmup)]
        if graphs:
            trainer.capture(trainer.backend)
        numbers += [trainer.step() for _ in range(BEFORE)]
        if graphs:
            expect(trainer.session.counters, mismatched=0, replayed=2 * BEFORE)
        with case.fault(trainer) or nullcontext():
            numbers += [trainer.step() for _ in range(AFTER)]
        return numbers, trainer.session and trainer.session.counters


@pytest.mark.parametrize("clause", FAULTS)
def test_each_fault_is_seen_by_its_clause_and_by_no_other(
    clause: str, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Training stays bit-equal; and without the clause this test would fail: a mutation run."""
    case = FAULTS[clause]
    eager, _ = train(case, graphs=False)
    with caplog.at_level(logging.WARNING, "megatron_cg.replay.mismatch_policy"):
        graphed, counters = train(case, graphs=True)
    assert graphed == eager
    assert counters.mismatched > 0 and counters.eager == counters.mismatched
    reports = [
        r.getMessage() for r in caplog.records if r.name == "megatron_cg.replay.mismatch_policy"
    ]
    assert any(f"({clause})" in report and "layer 0" in report for report in reports), reports
    assert len(set(reports)) == len(reports) <= 2
    with switched_off(clause):
        assert not passes(case, eager)


def passes(case: Case, eager: Any) -> bool:
    """Whether the fault is seen and training stays as it would be eagerly."""
    try:
        graphed, counters = train(case, graphs=True)
    except Exception:
        return False
    return bool(graphed == eager and counters.mismatched > 0)


def test_a_table_that_never_changes_is_read_in_place(one_rank: None) -> None:
    """Of hidden states, mask and rotary table, the table is not copied."""
    counts = [train(Case(lambda _trainer: None, warmup=n), graphs=True)[1] for n in (1, 2)]
    replays = 2 * (BEFORE + AFTER)
    assert [c.replayed for c in counts] == [replays, replays]
    assert [c.inputs_in_place for c in counts] == [0, replays]
    assert [c.inputs_copied for c in counts] == [3 * replays, 2 * replays]
    assert counts[0].bytes_copied > counts[1].bytes_copied > 0
