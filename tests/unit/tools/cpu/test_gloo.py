"""Gloo groups have one worker each: two of them break the heap when they finish at once."""

from __future__ import annotations

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
from torch._C._distributed_c10d import FileStore

from megatron_cg.tools.cpu import gloo
from megatron_cg.tools.cpu.fakes import cpu_fakes
from megatron_cg.tools.cpu.gloo import one_worker_a_group
from megatron_cg.tools.cpu.launch import run_processes

ProcessGroupGloo: Any = c10d.ProcessGroupGloo
CPU = torch.device("cpu")
GATHERS, IN_FLIGHT = 200, 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/store"
    if dist.is_initialized():
        dist.destroy_process_group()


def group_of_one(store: str) -> Any:
    dist.init_process_group(
        "gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    return dist.group.WORLD


@pytest.mark.parametrize("interface", ["lo", "lo,lo", ""])
def test_a_group_made_in_the_block_has_one_worker(
    store: str, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    with one_worker_a_group():
        options = group_of_one(store)._get_backend(CPU).options
    assert (options._threads, options._timeout) == (1, timedelta(seconds=77))
    assert len(options._devices) == len(interface.split(","))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]


def test_a_group_that_is_given_options_or_a_bare_time_limit_has_one_worker_too(
    tmp_path: Path,
) -> None:
    given = ProcessGroupGloo._Options()
    given._devices, given._threads = [ProcessGroupGloo.create_device(interface="lo")], 4
    found = []
    with one_worker_a_group(), one_worker_a_group():
        for number, last in enumerate(((given,), (timedelta(seconds=9),), ())):
            store = FileStore(f"{tmp_path}/{number}", 1)
            found.append(ProcessGroupGloo(store, 0, 1, *last).options)
    assert [options._threads for options in found] == [1, 1, 1]
    assert found[1]._timeout == timedelta(seconds=9)
    assert found[2]._timeout == ProcessGroupGloo._Options()._timeout


@pytest.mark.parametrize("interface", ["lo", ""])
def test_all_groups_of_a_process_share_one_device(
    store: str, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device has a thread that wakes up a hundred times a second, as long as it lives."""
    made = []
    for name in ("create_device", "create_default_device"):
        create = getattr(ProcessGroupGloo, name)

        def counted(create: Any = create, **named: str) -> Any:
            made.append(named)
            return create(**named)

        monkeypatch.setattr(ProcessGroupGloo, name, counted)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    gloo._device.cache_clear()
    with one_worker_a_group():
        group_of_one(store)
        for _ in range(3):
            dist.new_group([0])
    assert made == [{"interface": "lo"} if interface else {}]


def batch_threads() -> set[str]:
    """This process's threads that take the place of no other."""
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # It has ended since.
            if os.sched_getscheduler(int(path.name)) == os.SCHED_BATCH:
                found.add(path.name)
    return found


@pytest.mark.parametrize("interface", ["lo", ""])
def test_a_devices_thread_takes_the_place_of_none_that_wakes_it(interface: str) -> None:
    """Else it keeps a core while the thread that it waits for is not running."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("all threads of this run are scheduled in a way of their own")
    before = batch_threads()
    gloo._device.cache_clear()
    gloo._device(interface)
    assert len(batch_threads() - before) == 1
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_forked_process_makes_its_own_device() -> None:
    """The thread of its parent's device does not survive the fork."""
    gloo._device("lo")
    child = os.fork()
    if child == 0:
        os._exit(gloo._device.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gloo._device.cache_info().currsize >= 1


def test_groups_are_as_torch_makes_them_after_the_block_also_after_an_exception(store: str) -> None:
    original = ProcessGroupGloo.__init__
    with pytest.raises(KeyboardInterrupt), one_worker_a_group():
        assert ProcessGroupGloo.__init__ is not original
        raise KeyboardInterrupt
    assert group_of_one(store)._get_backend(CPU).options._threads == 2


def test_the_fakes_give_every_group_one_worker(store: str) -> None:
    with cpu_fakes():
        groups = [group_of_one(store), dist.new_group([0])]
    assert [group._get_backend(CPU).options._threads for group in groups] == [1, 1]


def worker_threads() -> int:
    """How many of this process's threads torch has named as workers of gloo groups."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(name.startswith("pt_gloo_runloop") for name in names)


def gather_and_count(directory: Path) -> None:
    """Gather several tensors at once, many times; write how many workers the two groups have."""
    sums = torch.zeros(())
    group = dist.new_group()
    for number in range(GATHERS):
        outputs = [torch.empty(2 * 20) for _ in range(IN_FLIGHT)]
        with ExitStack() as waiting:
            for output in outputs:
                with c10d._coalescing_manager(group, async_ops=True) as gathered:
                    mine = torch.full((20,), float(number + dist.get_rank()))
                    dist.all_gather_into_tensor(output, mine, group=group, async_op=True)
                waiting.callback(gathered.wait)
        sums += torch.stack(outputs).sum()
    dist.barrier()  # The default group's worker has run then, and so has its name.
    torch.save((worker_threads(), sums), directory / f"{dist.get_rank()}.pt")


def test_processes_gather_several_tensors_at_once_with_one_worker_a_group(tmp_path: Path) -> None:
    run_processes(partial(gather_and_count, tmp_path))
    expected = sum(20 * IN_FLIGHT * (number + number + 1) for number in range(GATHERS))
    for rank in range(2):
        workers, sums = torch.load(tmp_path / f"{rank}.pt")
        assert (workers, float(sums)) == (2, expected)


def average(directory: Path) -> None:
    """Averages and a sum of this rank's numbers; and an average that would not be waited for."""
    rank = dist.get_rank()
    mine = torch.tensor([1.0, 5.0]) * (rank + 1)
    reduced, total, part = mine.clone(), mine.clone(), torch.empty(1)
    dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
    dist.all_reduce(total)
    dist.reduce_scatter_tensor(part, mine, op=dist.ReduceOp.AVG)
    with pytest.raises(NotImplementedError, match="is not faked"):
        dist.all_reduce(mine, dist.ReduceOp.AVG, async_op=True)
    torch.save((reduced, total, part), directory / f"{rank}.pt")


def test_averages_are_sums_that_are_divided(tmp_path: Path) -> None:
    run_processes(partial(average, tmp_path))
    for rank in range(2):
        reduced, total, part = torch.load(tmp_path / f"{rank}.pt")
        assert [reduced.tolist(), total.tolist()] == [[1.5, 7.5], [3.0, 15.0]]
        assert part.tolist() == [[1.5], [7.5]][rank]
