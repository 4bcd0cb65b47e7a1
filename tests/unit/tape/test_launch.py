"""Processes that train together, however they are started."""

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cg.tape import launch
from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.align.compare import compare
from megatron_cg.tools.record.read_record import read_run
from tests.unit.interpreted import python


def write_down_and_train(folder: Path, plan: TrainingPlan) -> None:
    """Each rank's hash of a string and number of threads, and two runs."""
    from megatron_cg.tools.align.tape_run import train

    said = (hash("a string"), torch.get_num_threads())
    (folder / f"rank{dist.get_rank()}").write_text(repr(said))
    for name in ("eager", "graphs"):
        train(replace(plan, graphs=name == "graphs"), folder / name)


def test_spawned_processes_train_alike_though_each_has_its_own_seed_of_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun; elsewhere the processes are forked from one, and share its seed."""
    monkeypatch.setattr(launch, "START", "spawn")
    # A third of the time that Megatron's import takes.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = CpuModelConfig(layers=2, experts=4, graph_modules=("attn", "moe_router"))
    run_processes(partial(write_down_and_train, tmp_path, TrainingPlan(model, 3, 1)))
    hashes, threads = zip(
        *(ast.literal_eval((tmp_path / f"rank{rank}").read_text()) for rank in range(2)),
        strict=True,
    )
    assert hashes[0] != hashes[1] and threads == (1, 1)
    result = compare(read_run(tmp_path / "eager"), read_run(tmp_path / "graphs"))
    assert result.status == "identical", result.reason
    assert result.graphs["replayed"] > 0


JOINING = """
import sys, time, types
from contextlib import nullcontext
from pathlib import Path
import torch.distributed as dist

# Nothing of CUDA is called here, and Megatron takes long to import.
sys.modules["megatron_cg.tape.fakes"] = types.SimpleNamespace(cpu_fakes=nullcontext)
from megatron_cg.tape import launch

folder, join = Path(sys.argv[1]), dist.init_process_group

def slow(*args, rank, **options):
    join(*args, rank=rank, **options)
    if rank == 1:
        time.sleep(1)
        (folder / "joined").touch()

def body():
    (folder / f"rank{dist.get_rank()}").write_text(str((folder / "joined").exists()))

dist.init_process_group = slow
launch.START = "fork"
launch.run_processes(body)
"""
"""One rank takes longer to join; the other could end earlier and end this one too."""


def test_no_process_begins_before_all_have_joined(tmp_path: Path) -> None:
    python(JOINING, tmp_path, PYTHONPATH=str(Path(__file__).parents[4])).check_returncode()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["True", "True"]
