"""Processes that train together, however they are started."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cg.tools.align.compare import compare, read_run
from megatron_cg.tools.cpu import launch
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

NAME = "MEGATRON_CG_OF_THIS_TEST"


def write_down(folder: Path) -> None:
    """A file for each rank, of what it was started with."""
    said = (os.environ.get(NAME), os.environ["WORLD_SIZE"], torch.get_num_threads(), hash(NAME))
    (folder / f"rank{dist.get_rank()}").write_text(repr(said))


def test_they_have_the_environment_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.START == "forkserver"
    for value in ("one", "two", None):
        folder = tmp_path / str(value)
        folder.mkdir()
        if value is None:
            monkeypatch.delenv(NAME)
        else:
            monkeypatch.setenv(NAME, value)
        run_processes(partial(write_down, folder))
        said = [ast.literal_eval(path.read_text()) for path in folder.iterdir()]
        assert [words[:3] for words in said] == [(value, "2", 1)] * 2


def write_down_and_train(folder: Path, plan: TrainingPlan) -> None:
    from megatron_cg.tools.cpu.voting import train

    write_down(folder)
    for name in ("eager", "graphs"):
        train(replace(plan, graphs=name == "graphs"), folder / name)


def test_spawned_processes_train_alike_though_each_has_its_own_seed_of_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun; elsewhere the processes are forked from one, and share its seed."""
    monkeypatch.setattr(launch, "START", "spawn")
    monkeypatch.setenv(NAME, "spawned")
    monkeypatch.setenv(
        "TORCHDYNAMO_DISABLE", "1"
    )  # A third of the time that Megatron's import takes.
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = CpuModelConfig(layers=2, experts=4, graph_modules=("attn", "moe_router"))
    run_processes(partial(write_down_and_train, tmp_path, TrainingPlan(model, 3, 1)))
    said = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert len(said) == 2
    hashes = set()
    for text in said.values():
        value, size, threads, hashed = ast.literal_eval(text)
        assert (value, size, threads) == ("spawned", "2", 1)
        hashes.add(hashed)
    assert len(hashes) == 2
    result = compare(read_run(tmp_path / "eager"), read_run(tmp_path / "graphs"))
    assert result.status == "identical", result.reason
    assert result.graphs["replayed"] > 0


JOINING = """
import sys, time, types
from contextlib import nullcontext
from pathlib import Path
import torch.distributed as dist

# Nothing of CUDA is called here, and Megatron takes long to import.
sys.modules["megatron_cg.tools.cpu.fakes"] = types.SimpleNamespace(cpu_fakes=nullcontext)
from megatron_cg.tools.cpu import launch

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
    root = str(Path(__file__).parents[4])
    subprocess.run(
        [sys.executable, "-c", JOINING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        check=True,
        timeout=300,
    )
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["True", "True"]
