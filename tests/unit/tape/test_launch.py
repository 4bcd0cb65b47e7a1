"""Processes that train together, however they are started, over gloo groups of one worker each.

Two workers of a group break the heap when they finish at once.
"""

import ast
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_cg.tape import launch
from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.record.compare import compare, read_run
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


ProcessGroupGloo: Any = c10d.ProcessGroupGloo
GATHERS, IN_FLIGHT = 200, 4


def test_a_forked_process_makes_its_own_device() -> None:
    """The thread of its parent's device does not survive the fork."""
    launch._device("lo")
    child = os.fork()
    if child == 0:
        os._exit(launch._device.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert launch._device.cache_info().currsize >= 1


def worker_threads() -> int:
    """How many of this process's threads torch has named as workers of gloo groups."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(name.startswith("pt_gloo_runloop") for name in names)


def exchange(directory: Path) -> None:
    """Gather several tensors at once, many times; average; write what came of it."""
    rank, sums = dist.get_rank(), torch.zeros(())
    group = dist.new_group()
    for number in range(GATHERS):
        outputs = [torch.empty(2 * 20) for _ in range(IN_FLIGHT)]
        with ExitStack() as waiting:
            for output in outputs:
                with c10d._coalescing_manager(group, async_ops=True) as gathered:
                    mine = torch.full((20,), float(number + rank))
                    dist.all_gather_into_tensor(output, mine, group=group, async_op=True)
                waiting.callback(gathered.wait)
        sums += torch.stack(outputs).sum()
    mine = torch.tensor([1.0, 5.0]) * (rank + 1)
    average, total = mine.clone(), mine.clone()
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.all_reduce(total)
    numbers = [sums.tolist(), average.tolist(), total.tolist()]
    torch.save((worker_threads(), *numbers), directory / f"{rank}.pt")


def test_processes_gather_at_once_and_averages_are_sums_that_are_divided(tmp_path: Path) -> None:
    run_processes(partial(exchange, tmp_path))
    gathered = sum(20 * IN_FLIGHT * (number + number + 1) for number in range(GATHERS))
    for rank in range(2):
        workers, sums, average, total = torch.load(tmp_path / f"{rank}.pt")
        assert (workers, sums) == (2, gathered)
        assert (average, total) == ([1.5, 7.5], [3.0, 15.0])
