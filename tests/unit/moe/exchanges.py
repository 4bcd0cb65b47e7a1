"""What ``test_exchange.py`` and ``test_dispatcher.py`` run in several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.moe.exchange import exchange, gather_counts

SENT, WIDTH = 12, 5
SHARES: dict[str, list[list[int]]] = {
    "two, uneven": [[2, 10], [7, 5]],
    "two, all to one": [[12, 0], [12, 0]],
    "two, nothing exchanged": [[12, 0], [0, 12]],
    "two, nothing at all": [[0, 0], [0, 0]],
    "two, some rows for nobody": [[3, 4], [0, 5]],
    "four, uneven": [[1, 2, 3, 6], [0, 12, 0, 0], [4, 0, 4, 4], [3, 3, 3, 3]],
    "four, all to one": [[0, 0, 12, 0]] * 4,
}
"""Rows that each rank sends to each."""


def ranks_of(name: str) -> int:
    return len(SHARES[name])


def expected(rows: torch.Tensor, counts: list[list[int]], rank: int) -> torch.Tensor:
    """What an all-to-all with its counts on the host gives."""
    mine = [counts[source][rank] for source in range(len(counts))]
    sent = counts[rank]
    result = rows.new_empty((sum(mine), *rows.shape[1:]))
    dist.all_to_all_single(result, rows[: sum(sent)].contiguous(), mine, sent)
    return result


def check(folder: Path) -> None:
    """Exchange rows of each shape forward and backward; write what was wrong."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    wrong: list[str] = []
    for name, shares in SHARES.items():
        if len(shares) != ranks:
            continue
        for shape in ((WIDTH,), ()):
            torch.manual_seed(100 * rank)
            rows = torch.randn(SENT, *shape, requires_grad=True)
            counts = gather_counts(torch.tensor(shares[rank]), group)
            if counts.tolist() != shares:
                wrong.append(f"{name}: counts {counts.tolist()}")
            received = ranks * SENT
            found = exchange(rows, counts, received, group)
            theirs = expected(rows.detach(), shares, rank)
            used = theirs.shape[0]
            if found.shape[0] != received or not torch.equal(found[:used], theirs):
                wrong.append(f"{name}: rows of {shape}")
            if not found.isfinite().all():
                wrong.append(f"{name}: rows beyond those received are not finite")
            gradient = torch.randn(received, *shape)
            gradient[used:] = torch.nan
            found.backward(gradient)
            back = expected(gradient, [list(one) for one in zip(*shares, strict=True)], rank)
            assert rows.grad is not None
            if not torch.equal(rows.grad[: sum(shares[rank])], back):
                wrong.append(f"{name}: gradients of {shape}")
    (folder / f"{rank} of {ranks}.json").write_text(json.dumps(wrong))
