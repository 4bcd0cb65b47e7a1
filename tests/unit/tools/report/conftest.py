"""Records to make pages of: made-up ones, and those of two real runs on the CPU."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.telemetry.sinks import recording
from megatron_cg.tools.record.record import Recorder
from tests.unit.tools.report.made_up import make_record, write

MODEL = CpuModelConfig(layers=3, graph_modules=("attn", "mlp"), sequence_length=16)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of two ranks with everything that a record can hold; its losses come to differ."""
    directory = tmp_path_factory.mktemp("made-up")
    write(directory / "eager" / "record", *[make_record(graphs=False)] * 2)
    write(directory / "graphs" / "record", *[make_record(off=17)] * 2)
    return directory


@pytest.fixture
def tape_pair(one_rank: None, tmp_path: Path) -> Path:
    """A pair of real runs, in a folder as ``megatron-cg align --work-dir`` leaves it."""
    from megatron.core import parallel_state

    for name in ("eager", "graphs"):
        torch.manual_seed(7)
        plan = TrainingPlan(MODEL, steps=8, warmup_steps=3, graphs=name == "graphs")
        train_recorded(plan, tmp_path / "tape" / name / "record")
        parallel_state.destroy_model_parallel()
    return tmp_path / "tape"


def train_recorded(plan: TrainingPlan, directory: Path) -> None:
    from megatron_cg.tape.train import Trainer
    from megatron_cg.tools.align.tape_run import record_steps

    recorder = Recorder(directory)
    with recording(recorder), closing(Trainer(plan)) as trainer:
        record_steps(plan, trainer, recorder)
        recorder.finish([trainer.model])
