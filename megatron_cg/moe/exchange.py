"""An exchange of rows between ranks, by counts that stay on the device.

Note [By an all-gather]
    An all-to-all of NCCL or gloo takes its counts on the host. An all-gather has one shape: each
    rank gathers the rows of all, and selects those for itself by an index that is computed on the
    device. It moves as many times more bytes as the group has ranks, and holds them until the
    selection. It works wherever the process group works, inside a graph too.

Note [Rows beyond those received]
    The result has a fixed number of rows. Those beyond the received ones are zero. The backward
    pass does not send them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_counts(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Rows that each rank sends to each: int64 ``[from, to]``, of this rank's ``[to]``."""
    gathered = sent.new_empty(group.size() * group.size())
    dist.all_gather_into_tensor(gathered, sent.contiguous(), group=group)
    return gathered.view(group.size(), group.size())


def exchange(
    rows: torch.Tensor, counts: torch.Tensor, received: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to the ranks of ``group`` and receive theirs, with autograd. A collective call.

    Args:
        rows: ``[sent, ...]``, those for rank 0 first. All ranks have the same ``sent``.
        counts: int64 ``[from, to]``, as :func:`gather_counts` returns it.
        received: the number of rows of the result, at least as many as any rank receives.
        group: the ranks.

    Returns:
        ``[received, ...]``, those from rank 0 first; see Note [Rows beyond those received].
    """
    apply: Any = _Exchange.apply
    result: torch.Tensor = apply(rows, counts, received, group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: torch.Tensor, received: int, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(counts)
        ctx.sent, ctx.group = rows.shape[0], group
        return _exchanged(rows, counts, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (counts,) = ctx.saved_tensors
        back = _exchanged(gradients[0], counts.t().contiguous(), ctx.sent, ctx.group)
        return back, None, None, None


def _exchanged(
    rows: torch.Tensor, counts: torch.Tensor, received: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """See Note [By an all-gather]."""
    ranks, me = group.size(), group.rank()
    last = ranks * rows.shape[0]
    gathered = rows.new_empty((last + 1, *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered[:last], rows.contiguous(), group=group)
    gathered[last].zero_()
    lengths = counts[:, me]
    starts = (counts.cumsum(1) - counts)[:, me] + rows.shape[0] * torch.arange(
        ranks, device=counts.device
    )
    ends = lengths.cumsum(0)
    place = torch.arange(received, device=counts.device)
    source = torch.searchsorted(ends, place, right=True).clamp_(max=ranks - 1)
    index = starts[source] + place - (ends - lengths)[source]
    return gathered.index_select(0, torch.where(place < ends[-1], index, last))
