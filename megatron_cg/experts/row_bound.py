"""Bounds of the rows that ranks exchange, and keep for the backward pass, below the worst case.

Note [Beyond the bound]
    A slot (``slots.py``) has room for a fixed number of rows. If a rank has more rows for another
    one, those beyond are not exchanged: both ranks clip their counts alike, and the result of such
    a row is zero. So every index stays in range and every number is finite, but the numbers of
    this step are wrong, and the optimizer must not see them. The bound keeps the largest number of
    rows until the step's end.

Note [When the host knows]
    A forward pass counts rows and a backward pass does not count others. So ranks share what they
    found after the last forward pass of a step. The host reads it after the last backward pass is
    queued, and does not wait for that pass.

Every tensor here names its device: layers may be made inside of ``torch.device("meta")``.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_cg.errors import say
from megatron_cg.experts.stash import Stash

MULTIPLE = 128
"""Rows of an expert that a grouped GEMM computes at a time."""


class Excess(NamedTuple):
    """More rows than graphs have room for."""

    rows: int
    """The most that a rank had for another, or that its layers had to keep."""
    bound: int
    """What graphs have room for."""
    enough: float
    """The factor of ``flag`` with which they fit."""
    flag: str

    def __str__(self) -> str:
        setting = say("{flag:{name} {enough:g}}", name=self.flag, enough=self.enough)
        is_slot = self.flag == "--cg-moe-rows"
        where = "for another in a MoE layer" if is_slot else "of all MoE layers"
        return (
            f"a rank had {self.rows:,} rows {where}, bound {self.bound:,}. With {setting} or more "
            "it would have fitted."
        )


def clipped(counts: torch.Tensor, slot: int) -> torch.Tensor:
    """``counts`` without rows beyond a slot: int64 ``[ranks, experts]``, of rows in slots."""
    ends = counts.cumsum(1).clamp_(max=slot)
    return ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))


def enough(rows: int, average: float) -> float:
    """The factor with which ``rows`` would have fitted, rounded up to hundredths."""
    return math.ceil(100 * rows / average) / 100


class RowBound:
    """The bounds of all models that are built with it, and whether a step exceeded them.

    ``factor`` is how many times the rows that a rank sends to each on average, at least 1; None is
    room for any routing. ``stash`` is the factor of :class:`~megatron_cg.experts.stash.Stash`; None
    is that each layer keeps all rows.
    """

    def __init__(self, factor: float | None, stash: float | None = None) -> None:
        self.factor, self.stash_factor = factor, stash
        self.stash = None if stash is None else Stash(stash)
        self.flag = "--cg-moe-stash" if factor is None else "--cg-moe-rows"
        """The flag that it was made for."""
        self.bound = 0
        """Rows of a slot, in the last exchange that was captured."""
        self._average = 0.0
        self._most = torch.empty(0, device="cpu")
        self._host = torch.empty(0, device="cpu")
        self._shared: torch.cuda.Event | None = None

    def place(self) -> None:
        """Make the memory that graphs write to. A second call does nothing."""
        if not self._most.numel():
            # The most rows beyond the bound of a slot, and beyond the stash.
            self._most = torch.zeros(2, dtype=torch.int32, device="cuda")
            self._host = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=True)
            if self.stash is not None:
                self.stash.place(self._most[1:])

    def slot(self, sent: int, ranks: int, worst: int) -> int:
        """Rows of a slot if a rank sends ``sent`` to ``ranks``; ``worst`` at most."""
        self._average = sent / ranks
        multiples = math.ceil(min((self.factor or math.inf) * self._average, worst) / MULTIPLE)
        self.bound = min(multiples * MULTIPLE, worst)
        return self.bound

    def watch(self, counts: torch.Tensor) -> None:
        """Notice rows beyond the bound, on the device, of int64 ``[ranks]`` that are sent."""
        most, before = counts.amax(), self._most[0]
        exceeded = torch.where(most > self.bound, most, 0).to(before.dtype)
        before.copy_(torch.maximum(before, exceeded))

    def begin_step(self) -> None:
        """Forget what earlier passes exceeded, such as those of a capture."""
        self._most.zero_()
        self._shared = None
        if self.stash is not None:
            self.stash.begin_step()

    def share(self) -> None:
        """Let all ranks know the largest number of rows. A collective call; nothing waits."""
        dist.all_reduce(self._most, op=dist.ReduceOp.MAX)
        self._host.copy_(self._most, non_blocking=True)
        self._shared = torch.cuda.Event()
        self._shared.record()

    def sharing(self, forward_step: Callable[..., Any], passes: int) -> Callable[..., Any]:
        """Let a microbatch's forward pass share, if it is the last of a step's ``passes``."""
        left = passes

        @wraps(forward_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            result = forward_step(*args, **kwargs)
            left -= 1
            if left == 0:
                self.share()
            return result

        return step

    def exceeded(self) -> Excess | None:
        """The largest number of rows beyond a bound on any rank in this step; None if none is.

        Waits for what :meth:`share` queued, and calls it first unless this step did.
        """
        if self._shared is None:
            self.share()
        assert self._shared is not None
        self._shared.synchronize()
        rows, kept = self._host.tolist()
        if rows:
            return Excess(rows, self.bound, enough(rows, self._average), "--cg-moe-rows")
        if kept and self.stash is not None:
            stash = self.stash
            return Excess(kept, stash.rows, enough(kept, stash.voted), "--cg-moe-stash")
        return None

    def holds(self) -> bool:
        """Whether no rank has exceeded the bound in this step so far. A collective call; waits."""
        most = self._most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return not most.any()
