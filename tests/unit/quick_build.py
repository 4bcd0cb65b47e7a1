"""Megatron-FSDP built without what it gathers for each weight; imported by the fork server.

As it builds a model, Megatron-FSDP gathers the shape of each weight's shards from all ranks twice:
to check its own layout, and for checkpoints, before which it gathers them again. That took a sixth
of the time of the tests that train in several processes. Processes that are started as for users
gather them still, and so does the one that runs the tests.
"""

from __future__ import annotations

from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

GATHERED = ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata")


def nothing(_shard: object) -> None:
    """Gather nothing."""


for name in GATHERED:
    if hasattr(upstream, name):  # Another release may have others, and the tests take longer then.
        setattr(upstream, name, nothing)
