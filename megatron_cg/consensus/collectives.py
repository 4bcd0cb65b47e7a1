"""Whether a piece of code called collectives, from the counters of the process groups.

It is an error in NCCL if a collective is in a graph on one rank and not on another: "that an
operation is captured is a collective property and must be uniform over all ranks" (NCCL user
guide, "Using NCCL with CUDA Graphs"). So capture must know which graphs contain collectives.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "torch",
        "torch.distributed:ProcessGroup._get_sequence_number_for_group",
        "the count of a group's collectives",
    ),
    Symbol(
        "torch",
        "torch.distributed.distributed_c10d:_world",
        "all groups of this process",
        attributes=("pg_map",),
    ),
)


def collectives_so_far() -> int:
    """Number of collectives that this process has called so far, over all its groups.

    Point-to-point operations are not counted.
    """
    total = 0
    group: Any
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            # This rank is not in the group, or the backend keeps no count.
            with suppress(RuntimeError):
                total += int(group._get_sequence_number_for_group())
    return total
