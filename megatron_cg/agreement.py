"""One decision for all ranks at the end of a capture: all replay, or none does.

A rank that captured while another did not would enter collectives that the other never does. So
every rank, also one that failed, puts its verdict into one small all-reduce on a gloo group of its
own: CPU tensors, never NCCL, never inside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_cg.errors import CaptureError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others' verdicts, as long as NCCL waits by default: capture of a
large model takes minutes, and ranks differ."""


class Agreement:
    """The vote of all ranks of the default process group; made by all ranks together.

    Args:
        timeout: how long a vote waits for a rank that does not come.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._voted = False

    def confirm(self) -> None:
        """Say that this rank's capture is whole. Raises CaptureError when another rank's is not."""
        failed = self._vote(failed=False)
        if failed:
            raise CaptureError(
                f"capture failed on rank {', '.join(map(str, failed))}, whose own log has the "
                "reason. All ranks give their graphs up; hooks and state are as before"
            )

    def report_failure(self) -> None:
        """Say that this rank's capture failed, so that all give up. Does nothing after a vote.

        Raises CaptureError when the others do not answer: they are then inside collectives that
        this rank will not join, and going on would pair it with the wrong ones.
        """
        if self._voted:
            return
        try:
            self._vote(failed=True)
        except RuntimeError as error:
            raise CaptureError(
                "this rank's capture failed, and the other ranks did not come to agree on it "
                f"({error}). Training cannot go on, since ranks no longer do the same. To train "
                "without graphs: --cuda-graph-impl none"
            ) from error

    def _vote(self, *, failed: bool) -> Sequence[int]:
        """The ranks that failed."""
        self._voted = True
        verdicts = torch.zeros(dist.get_world_size(), dtype=torch.int32, device="cpu")
        verdicts[dist.get_rank()] = int(failed)
        dist.all_reduce(verdicts, group=self._group)
        ranks: list[int] = verdicts.nonzero().flatten().tolist()
        return ranks
