"""A bound of the rows that a rank receives, below the worst case.

Note [Beyond the bound]
    Graphs have room for a fixed number of rows. All ranks of an exchange know the rows of each, so
    they find together, on the device, that one of them would receive more. Then nothing is
    exchanged in that layer: all counts become zero. So every index stays in range and every number
    is finite, but the numbers of this step are wrong, and the optimizer must not see them. The
    bound keeps the largest number of rows until the step's end.

Note [When the host knows]
    A forward pass counts rows and a backward pass does not count others. So ranks share what they
    found after the last forward pass of a step. The host reads it after the last backward pass is
    queued, and does not wait for that pass.

Note [A multiple of 128]
    A grouped GEMM computes 128 rows of an expert at a time. Rows of a smaller remainder would take
    the same time and, in the allocator, the same memory.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

MULTIPLE = 128
"""See Note [A multiple of 128]."""


class RowBound:
    """The bound of all models that are built with it, and whether a step exceeded it.

    Args:
        factor: how many times the rows that a rank sends it can receive; at least 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.bound = self._sent = 0
        """The bound of the last exchange that was captured, in rows."""
        self._most = torch.empty(0)
        self._host = torch.empty(0)
        self._shared: torch.cuda.Event | None = None

    def place(self) -> None:
        """Make the memory that graphs write to. A second call does nothing."""
        if not self._most.numel():
            self._most = torch.zeros(1, dtype=torch.int32, device="cuda")
            self._host = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def rows(self, sent: int, worst: int) -> int:
        """Rows that a rank has room for if each rank sends ``sent``; ``worst`` at most."""
        self._sent = sent
        multiples = math.ceil(min(self._factor * sent, worst) / MULTIPLE)
        self.bound = min(multiples * MULTIPLE, worst)
        return self.bound

    def fits(self, counts: torch.Tensor, rows: int) -> torch.Tensor:
        """1 if no rank receives more than ``rows``, otherwise 0, on the device.

        Args:
            counts: int64 ``[from, to]``; see :func:`megatron_cg.moe.exchange.gather_counts`.
            rows: what :meth:`rows` returned.
        """
        most = counts.sum(0).amax()
        fits = most <= rows
        exceeded = torch.where(fits, 0, most).to(self._most.dtype)
        self._most.copy_(torch.maximum(self._most, exceeded))
        return fits.to(counts.dtype)

    def enough(self, rows: int) -> float:
        """The factor with which ``rows`` would have fitted, rounded up to hundredths."""
        return math.ceil(100 * rows / self._sent) / 100

    def begin_step(self) -> None:
        """Forget what earlier passes exceeded, such as those of a capture."""
        self._most.zero_()
        self._shared = None

    def share(self) -> None:
        """Let all ranks know the largest number of rows. A collective call; nothing waits."""
        dist.all_reduce(self._most, op=dist.ReduceOp.MAX)
        self._host.copy_(self._most, non_blocking=True)
        self._shared = torch.cuda.Event()
        self._shared.record()

    def exceeded(self) -> int:
        """The largest number of rows beyond the bound on any rank in this step; 0 if none is.

        Waits for what :meth:`share` queued, and calls it first unless this step did.
        """
        if self._shared is None:
            self.share()
        assert self._shared is not None
        self._shared.synchronize()
        return int(self._host)

    def holds(self) -> bool:
        """Whether no rank has exceeded the bound in this step so far. A collective call; waits."""
        most = self._most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return not most
