"""Models whose parameters stay where they are: DistributedDataParallel, or no wrapper at all."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.fsdp.sharding import Sharding


class Unsharded(Sharding):
    """See :class:`megatron_cg.fsdp.sharding.Sharding`. All hooks are the user's.

    Args:
        wrapped: the ``DistributedDataParallel``, or the model.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        self.wrapped = wrapped
        ddp = isinstance(wrapped, DistributedDataParallel)
        self.network = wrapped.get_submodule("module") if ddp else wrapped
        self.name = "DistributedDataParallel" if ddp else "no sharding"
        self.renews_accumulators = not ddp
