"""What ``test_slots.py`` runs in several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.moe.peer_memory import PeerMemory
from megatron_cg.moe.slots import Collective, Transport, exchange, find_places

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
"""Rows that each rank sends to each, of one expert."""


def expected(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """What an all-to-all with its counts on the host gives."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows[: sum(sent)].contiguous(), received, sent)
    return result


def check() -> Any:
    """Exchange rows of each shape forward and backward by each transport; say what was wrong."""
    group: Any = dist.group.WORLD
    return [*checked(Collective(group)), *checked(PeerMemory(group))]


def checked(transport: Transport) -> list[str]:
    """What was wrong with one transport."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    for name, shares in SHARES.items():
        if len(shares) != ranks:
            continue
        sent, received = shares[rank], [row[rank] for row in shares]
        here, there = (
            find_places(torch.tensor(counts).unsqueeze(1), SENT, rows)
            for counts, rows in ((sent, SENT), (received, ranks * SENT))
        )
        for shape in ((WIDTH,), ()):
            torch.manual_seed(100 * rank)
            rows = torch.randn(SENT, *shape, requires_grad=True)
            found = exchange(rows, here, there, transport)
            theirs = expected(rows.detach(), sent, received)
            used = theirs.shape[0]
            if found.shape[0] != ranks * SENT or not torch.equal(found[:used], theirs):
                wrong.append(f"{name}: rows of {shape}")
            if found[used:].any():
                wrong.append(f"{name}: rows beyond those received are not zero")
            gradient = torch.randn(ranks * SENT, *shape)
            gradient[used:] = torch.nan
            found.backward(gradient)
            back = expected(gradient, received, sent)
            assert rows.grad is not None
            if not torch.equal(rows.grad[: sum(sent)], back) or rows.grad[sum(sent) :].any():
                wrong.append(f"{name}: gradients of {shape}")
    return wrong
