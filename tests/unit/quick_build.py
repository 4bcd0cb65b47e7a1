"""Megatron-FSDP built in less time; imported by the fork server.

As it builds a model, Megatron-FSDP gathers the shape of each weight's shards from all ranks twice:
to check its own layout, and for checkpoints, before which it gathers them again. That took a sixth
of the time of the tests that train in several processes. Processes that are started as for users
gather them still, and so does the one that runs the tests.

It also collects garbage after each model, and Megatron before and after each capture, to give a
GPU's memory back. Processes that train many models then spent up to a quarter of their time there:
such a model never goes by itself, so each collection visits all earlier ones. Here these calls
collect only the young generations. Calls of the tests and of this package are as they were.

The fast path reads the source of Megatron's functions. At its first call, ``inspect`` looks for the
file of every module, here for all processes.
"""

import gc
import importlib
import importlib.util
import inspect
from types import SimpleNamespace

FSDP = ["megatron.core.distributed.fsdp.src.megatron_fsdp"]
if importlib.util.find_spec("megatron_fsdp") is not None:
    FSDP.append("megatron_fsdp")
COLLECTING = (
    *(f"{package}.param_and_grad_buffer" for package in FSDP),
    "megatron.core.transformer.cuda_graphs",
)
GATHERED = ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata")
YOUNG = SimpleNamespace(collect=lambda: gc.collect(1), freeze=gc.freeze, unfreeze=gc.unfreeze)
"""What these modules use of ``gc``."""


def nothing(_shard: object) -> None:
    """Gather nothing."""


inspect.getsource(nothing)
# Another release may have other names, and the tests take longer then.
for name in COLLECTING:
    module = importlib.import_module(name)
    for gathered in GATHERED:
        if hasattr(module, gathered):
            setattr(module, gathered, nothing)
    if hasattr(module, "gc"):
        vars(module)["gc"] = YOUNG
# Python's default of 700 objects between collections is for small heaps.
gc.set_threshold(20_000, 20, 20)
