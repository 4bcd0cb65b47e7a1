"""Two real runs on the CPU, recorded: the model eager, and with tapes."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import torch

from megatron_cg.telemetry.record import Recorder, recording
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.cpu.voting import VotingTrainer

MODEL = CpuModelConfig(layers=3, graph_modules=("attn", "mlp"), sequence_length=16)


def train_recorded(plan: TrainingPlan, directory: Path) -> None:
    """Train in this process, under the fakes, and write the record."""
    recorder = Recorder(directory)
    with recording(recorder):
        trainer = VotingTrainer(plan)
        with closing(trainer):
            for number in range(plan.steps):
                if plan.graphs and number == plan.warmup_steps:
                    trainer.start()
                start = time.perf_counter()
                loss, norm = trainer.step()
                losses = {"lm loss": torch.tensor(loss, dtype=torch.float64)}
                recorder.add_step(losses, norm, False, start)
            if plan.graphs:
                recorder.note("graphs", trainer.report())
            recorder.finish([trainer.model])


def make_pair(directory: Path, steps: int = 8) -> Path:
    """``directory`` as ``megatron-cg align --work-dir`` leaves it, of one rank."""
    from megatron.core import parallel_state

    for name in ("eager", "graphs"):
        torch.manual_seed(7)
        plan = TrainingPlan(MODEL, steps=steps, warmup_steps=3, graphs=name == "graphs")
        train_recorded(plan, directory / name / "record")
        parallel_state.destroy_model_parallel()
    return directory
