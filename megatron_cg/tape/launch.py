"""Starts processes on this machine that train together over gloo, as on NCCL."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from megatron_cg.tape.gloo import one_worker_a_group

START = "spawn"
"""How processes are started: one of multiprocessing's methods. Forked ones share a hash seed, so
sets of strings have the same order on all ranks; spawned ones do not."""


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
    with one_worker_a_group():
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
