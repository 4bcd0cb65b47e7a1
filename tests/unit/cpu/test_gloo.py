"""Gloo groups have one worker each: two of them break the heap when they finish at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from megatron_cg.cpu.gloo import one_worker_a_group
from megatron_cg.cpu.launch import run_processes
from megatron_cg.cpu.standins import cpu_standins

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


def worker_threads() -> int:
    """How many of this process's threads torch has named as workers of gloo groups."""
    names = (task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())
    return sum(name.startswith("pt_gloo_runloop") for name in names)


@pytest.mark.parametrize("interface", ["lo", "lo,lo", ""])
def test_a_group_made_in_the_block_has_one_worker(
    store: str, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    before = worker_threads()
    with one_worker_a_group():
        backend = group_of_one(store)._get_backend(CPU)
    assert worker_threads() == before + 1
    options = backend.options
    assert options._timeout == timedelta(seconds=77)
    assert len(options._devices) == max(1, len(interface.split(",")))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]


def test_a_group_that_is_given_options_has_one_worker_too(tmp_path: Path) -> None:
    options = ProcessGroupGloo._Options()
    options._devices, options._threads = [ProcessGroupGloo.create_device(interface="lo")], 4
    before = worker_threads()
    with one_worker_a_group(), one_worker_a_group():
        group = ProcessGroupGloo(dist.FileStore(f"{tmp_path}/store", 1), 0, 1, options)
        timed = ProcessGroupGloo(dist.FileStore(f"{tmp_path}/two", 1), 0, 1, timedelta(seconds=9))
    assert worker_threads() == before + 2
    assert (group.options._threads, timed.options._timeout) == (1, timedelta(seconds=9))


def test_groups_are_as_torch_makes_them_after_the_block_also_after_an_exception(store: str) -> None:
    original = ProcessGroupGloo.__init__
    with pytest.raises(KeyboardInterrupt), one_worker_a_group():
        assert ProcessGroupGloo.__init__ is not original
        raise KeyboardInterrupt
    before = worker_threads()
    group_of_one(store)
    assert worker_threads() == before + 2


def test_the_stand_ins_give_a_group_one_worker(store: str) -> None:
    before = worker_threads()
    with cpu_standins():
        group_of_one(store)
        dist.new_group([0])
    assert worker_threads() == before + 2


def gather_and_count(directory: Path) -> None:
    """Gather several tensors at once, many times; write how many workers the two groups have."""
    sums = torch.zeros(())
    group = dist.new_group()
    for number in range(GATHERS):
        outputs = [torch.empty(2 * 20) for _ in range(IN_FLIGHT)]
        with ExitStack() as waiting:
            for output in outputs:
                with dist._coalescing_manager(group, async_ops=True) as gathered:
                    mine = torch.full((20,), float(number + dist.get_rank()))
                    dist.all_gather_into_tensor(output, mine, group=group, async_op=True)
                waiting.callback(gathered.wait)
        sums += torch.stack(outputs).sum()
    torch.save((worker_threads(), sums), directory / f"{dist.get_rank()}.pt")


def test_processes_gather_several_tensors_at_once_with_one_worker_a_group(tmp_path: Path) -> None:
    run_processes(partial(gather_and_count, tmp_path))
    expected = sum(20 * IN_FLIGHT * (number + number + 1) for number in range(GATHERS))
    for rank in range(2):
        workers, sums = torch.load(tmp_path / f"{rank}.pt")
        assert (workers, float(sums)) == (2, expected)
