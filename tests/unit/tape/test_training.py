"""Trainings without a GPU: one process and two alike, and batches in turn and endless."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.record.read_record import read_run

SHARED = TrainingPlan(CpuModelConfig(layers=1, bf16=False), 4)


def test_the_number_of_processes_does_not_matter_but_for_rounding(tmp_path: Path) -> None:
    """The collectives that the fakes lead to gloo sum what they should."""
    alone = replace(SHARED, micro_batch_size=2 * SHARED.micro_batch_size)
    from megatron_cg.tools.align.tape_run import train

    run_processes(partial(train, SHARED, tmp_path / "shared"))
    run_processes(partial(train, alone, tmp_path / "alone"), processes=1)
    pair = [read_run(tmp_path / name)[0]["steps"] for name in ("shared", "alone")]
    assert len(pair[0]) == SHARED.steps
    for left, right in zip(*pair, strict=True):
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
        loss, other = left["losses"]["lm loss"], right["losses"]["lm loss"]
        assert loss == pytest.approx(other, rel=1e-6)


def test_labels_are_the_next_tokens_and_the_text_begins_again(one_rank: None) -> None:
    from megatron.core import parallel_state

    from megatron_cg.tape.train import batches

    parallel_state.initialize_model_parallel()
    model = CpuModelConfig(sequence_length=10_000)
    endless = batches(TrainingPlan(model, micro_batch_size=2))
    taken = [next(endless) for _ in range(4)]
    tokens = torch.cat([tokens.flatten() for tokens, _ in taken])
    labels = torch.cat([labels.flatten() for _, labels in taken])
    begin = next(
        n for n in range(10_000, 80_000, 10_000) if torch.equal(tokens[:50], tokens[n:][:50])
    )
    assert torch.equal(tokens[1:begin], labels[: begin - 1])
    assert torch.equal(tokens[: 80_000 - begin], tokens[begin:])
