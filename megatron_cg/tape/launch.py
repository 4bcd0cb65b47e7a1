"""Starts processes on this machine that train together over gloo, as on NCCL.

A gloo group of torch 2.11 has two worker threads, which store the name of the last finished
collective in one ``std::string`` without a lock (ProcessGroupGloo.cpp, ``runLoop``). If two end at
the same moment, the process may end in "malloc(): unaligned tcache chunk detected" or SIGSEGV. One
worker has no race.

All groups of a process share one gloo device per interface. A device has a thread that wakes up
every 10 ms, and torch creates one per group: those of the 40 groups of a model took more CPU time
than the training. The thread is scheduled as ``SCHED_BATCH``, so that it never takes the core of
the thread that wakes it: on two cores a collective then takes 0.1 ms instead of 0.5.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from megatron_cg.upstream.patch import Undo, combine_undos, replace_function, undone_after
from megatron_cg.upstream.symbols import Symbol

START = "spawn"
"""How processes are started: one of multiprocessing's methods. Forked ones share a hash seed, so
sets of strings have the same order on all ranks; spawned ones do not."""

_MODULE = "torch.distributed.distributed_c10d"
_GROUP = Symbol(
    f"{_MODULE}:ProcessGroupGloo",
    "the class of gloo's groups",
    attributes=("create_device", "create_default_device"),
)
_OPTIONS = Symbol(
    f"{_MODULE}:ProcessGroupGloo._Options",
    "what a gloo group is made with",
    attributes=("_devices", "_threads", "_timeout"),
)
RELIES_ON = (_GROUP, _OPTIONS)


def one_worker_a_group() -> Undo:
    """Give each gloo group created from now on one worker thread and the process's device.

    Returns the undo; may be nested. A group that is created with options keeps their devices.
    """
    original = _GROUP.find().__init__

    def init(group: Any, store: Any, rank: int, size: int, given: Any = None, **named: Any) -> None:
        given = named.get("options", named.get("timeout", given))
        if given is None or isinstance(given, timedelta):
            # What torch itself uses for a group without options (torch 2.11, init.cpp).
            options = _OPTIONS.find()()
            options._devices = [_device(os.environ.get("GLOO_SOCKET_IFNAME", ""))]
            options._timeout = given or options._timeout
            given = options
        given._threads = 1
        original(group, store, rank, size, given)

    return replace_function(_GROUP.find(), "__init__", init)


def as_nccl() -> Undo:
    """Let two collectives take what NCCL takes and gloo does not, as Megatron calls them.

    ``all_to_all_single`` takes its sizes as tensors: Megatron turns them into lists only if it
    copied them from a GPU. ``all_reduce`` takes ``ReduceOp.AVG``: the sum is divided after it.
    """
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def listed(size: Any) -> Any:
        return size.tolist() if hasattr(size, "tolist") else size

    def all_to_all_single(output: Any, given: Any, *sizes: Any, **named: Any) -> Any:
        named = {name: listed(value) for name, value in named.items()}
        return exchange(output, given, *map(listed, sizes), **named)

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG or async_op:
            return reduce(tensor, op, group, async_op)
        reduce(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return None

    ours = (all_to_all_single, all_reduce)
    return combine_undos(replace_function(dist, one.__name__, one) for one in ours)


@cache
def _device(interface: str) -> Any:
    group = _GROUP.find()
    is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER
    try:
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if interface:
            return group.create_device(interface=interface)
        return group.create_default_device()
    finally:
        if is_usual:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# The device's thread does not survive a fork.
os.register_at_fork(after_in_child=_device.cache_clear)


def run_processes(body: Callable[[], Any], processes: int = 2) -> None:
    """Run ``body`` in that many processes under the fakes; gloo connects them over loopback.

    ``body`` must be picklable. When it raises in any process, this raises torch's
    ProcessRaisedException, with the traceback.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as directory:
        worker = partial(
            _worker,
            environment=dict(os.environ),  # A fork server keeps the environment of its own start.
            processes=processes,
            store=f"{directory}/store",
            body=body,
        )
        start_processes(worker, nprocs=processes, start_method=START)


def _worker(
    rank: int, environment: dict[str, str], processes: int, store: str, body: Callable[[], Any]
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_RANK=str(rank))
    # The host name may not resolve, and loopback opens no port to other machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # One thread per process: sums then have the same order on every machine.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with undone_after(one_worker_a_group()):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
        )
    # If a rank ends before another has connected, the other fails: "Connection closed by peer".
    dist.barrier()
    from megatron_cg.tape.fakes import cpu_fakes

    try:
        with cpu_fakes():
            # A capture collects garbage. The imported objects are never garbage, but most of the
            # work.
            gc.freeze()
            body()
    finally:
        dist.destroy_process_group()
    # Skip the interpreter's shutdown: threads of gloo may still run while it tears down modules.
    # About one in twenty runs then ended in "terminate called".
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
