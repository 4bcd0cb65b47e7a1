"""One rank runs units of several outputs eagerly, alone: buckets are reduced as on the others."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_optimizer
from torch import nn

from megatron_cg.integrations.standalone import graph_units
from tests.unit.integrations.standalone.sharded import under_v1
from tests.unit.ranks import on_ranks

WIDTH, STEPS, ODD = 8, 6, 4


class Block(nn.Module):
    """Its second output alone depends on ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.down(torch.tanh(self.up(x))), self.gate(x).square().mean()


class Network(nn.Module):
    """The embedding and the head are in another bucket, of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, seconds = self.embed(x), []
        for layer in self.layers:
            x, second = layer(x)
            seconds.append(second)
        return self.head(x), seconds


def trained(fast: bool | None) -> list[Any]:
    """Weights at the end, and how many passes were eager; ``fast`` is None without graphs.

    In one step rank 1 alone has fewer rows, and the loss does not use an output of layer 0.
    """
    torch.manual_seed(0)
    model = under_v1()(Network())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    graphs = None
    if fast is not None:
        graphs = graph_units(model, ["layers.*"], warmup_steps=1, backend="tape", fast_path=fast)
    rank = dist.get_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(2 if step == ODD and rank == 1 else 3, WIDTH, generator=generator)
        with graphs.step() if graphs is not None else nullcontext():
            optimizer.zero_grad()
            y, seconds = model(x)
            loss = y.square().mean() + sum(seconds[1 if step == ODD else 0 :])
            loss.backward()
            optimizer.step()
        del seconds  # Outputs that are kept would make the next passes eager.
    eager = 0 if graphs is None else graphs.counters.eager
    weights = [parameter.to_local().flatten().tolist() for parameter in model.parameters()]
    if graphs is not None:
        graphs.close()
    return [weights, eager]


def eager_passes() -> list[Any]:
    """In one process, without the fast path and with it: eager passes, if weights are right."""
    expected, _ = trained(None)
    runs = [trained(fast) for fast in (False, True)]
    return [eager if got == expected else "other weights" for got, eager in runs]


def test_buckets_of_a_rank_that_is_eager_alone_are_reduced_in_the_order_of_replays() -> None:
    assert on_ranks(eager_passes) == [[0, 0], [3, 3]]
