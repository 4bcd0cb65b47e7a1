"""Whether a piece of code called collectives, from the counters of the process groups.

It is an error in NCCL if a collective is in a graph on one rank and not on another: "that an
operation is captured is a collective property and must be uniform over all ranks" (NCCL user
guide, "Using NCCL with CUDA Graphs"). So capture must know which graphs contain collectives.

The counters belong to the process. If another thread calls a collective while a unit is captured,
such as one that saves a checkpoint, the unit is taken to hold collectives. All ranks take the union
of what they saw (``Agreement.confirm``), so it then votes more often than it has to, on all ranks
alike.
"""

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "torch.distributed:ProcessGroup",
        "a group that counts its collectives",
        attributes=("_get_sequence_number_for_group",),
    ),
    Symbol(
        "torch.distributed.distributed_c10d:_world",
        "all groups of this process",
        attributes=("pg_map",),
    ),
)


def collectives_so_far() -> int:
    """A number that grows with each collective that this process calls, of whatever group.

    Point-to-point operations are not counted.
    """
    if not dist.is_initialized():
        return 0
    return sum(map(_counted, list(dist.distributed_c10d._world.pg_map)))


def _counted(group: Any) -> int:
    # This rank is not in the group, or the backend keeps no count.
    with suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    return 0
