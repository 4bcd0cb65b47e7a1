"""Gloo groups have one worker each: two of them break the heap when they finish at once."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_cg.tape import launch
from megatron_cg.tape.launch import one_worker_a_group, run_processes

ProcessGroupGloo: Any = c10d.ProcessGroupGloo
GATHERS, IN_FLIGHT = 200, 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/store"
    if dist.is_initialized():
        dist.destroy_process_group()


def batch_threads() -> set[str]:
    """This process's threads that take the place of no other."""
    threads = set()
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # It has ended since.
            if os.sched_getscheduler(int(path.name)) == os.SCHED_BATCH:
                threads.add(path.name)
    return threads


@pytest.mark.parametrize("interface", ["lo", ""])
def test_groups_have_one_worker_each_and_share_one_device_an_interface(
    store: str, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device has a thread, which takes the place of none that wakes it."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("all threads of this run are scheduled in a way of their own")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    before, original = batch_threads(), ProcessGroupGloo.__init__
    launch._device.cache_clear()
    with one_worker_a_group():
        dist.init_process_group(
            "gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
        )
        groups = [dist.group.WORLD, *(dist.new_group([0]) for _ in range(3))]
    assert ProcessGroupGloo.__init__ is original
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    assert [each._threads for each in options] == [1] * 4
    assert options[0]._timeout == timedelta(seconds=77)
    assert len(batch_threads() - before) == 1
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]


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
