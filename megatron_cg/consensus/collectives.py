"""Whether a stretch of code called collectives, by the counts that process groups keep.

NCCL takes a collective that is part of a graph on one rank and not on another for an error: "that
an operation is captured is a collective property and must be uniform over all ranks" (NCCL user
guide, "Using NCCL with CUDA Graphs"). So it has to be known which graphs hold any.
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
    """Collectives called by this process up to now, over all of its groups.

    Relied on: torch 2.11, ``ProcessGroup._get_sequence_number_for_group``. Point-to-point
    operations are not in it.
    """
    total = 0
    group: Any
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            # A group that this rank is no member of, or whose backend keeps no count.
            with suppress(RuntimeError):
                total += int(group._get_sequence_number_for_group())
    return total
