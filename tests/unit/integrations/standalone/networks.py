"""Plain PyTorch models under the standalone package, and a training loop for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.integrations.standalone import GraphedUnits, graph_units

WIDTH, BATCH = 8, 3


class Block(nn.Module):
    """A unit with a parameter of its own, a flag, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        hidden = self.dropout(self.down(torch.tanh(self.up(x))))
        out: torch.Tensor = x * self.scale + (2 if double else 1) * hidden
        return out


class Network(nn.Module):
    """A stack of blocks, called in the order of ``order``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.order = [0, 1, 2]
        self.doubled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in self.order:
            x = self.layers[index](x, self.doubled)
        out: torch.Tensor = self.head(x)
        return out


class Run:
    """A sharded network and its steps, the same in every run but for the graphs."""

    def __init__(self, **options: Any) -> None:
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer

        torch.manual_seed(0)
        self.network = Network()
        self.model: Any = fully_shard_model(
            self.network,
            **{
                "fsdp_unit_modules": [Block],
                "fsdp_double_buffer": True,
                "fsdp_db_use_persist_buf_on_alloc_fail": True,
                "calculate_per_token_loss": True,
                **options,
            },
        )
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))
        self.graphs: GraphedUnits | None = None
        self.steps = 0
        torch.manual_seed(1)

    def with_graphs(self, units: Sequence[Any] = ("layers.*",), **options: Any) -> GraphedUnits:
        options = {"warmup_steps": 1, "backend": TapeBackend(), **options}
        self.graphs = graph_units(self.model, units, **options)
        return self.graphs

    def step(self, passes: int = 1) -> torch.Tensor:
        """The losses of one step of that many microbatches."""
        with self.graphs.step() if self.graphs is not None else nullcontext():
            self.optimizer.zero_grad()
            losses = []
            for _ in range(passes):
                losses.append(self.loss())
                losses[-1].backward()
            self.optimizer.step()
        self.steps += 1
        return torch.stack(losses).detach()

    def loss(self) -> torch.Tensor:
        x = torch.arange(float(BATCH * WIDTH)).reshape(BATCH, WIDTH).add(self.steps).sin()
        loss: torch.Tensor = self.model(x).square().sum()
        return loss

    def weights(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            yield parameter.to_local().detach().clone()


def assert_equal(one: Run, two: Run) -> None:
    """Every parameter of both runs, bit for bit."""
    for a, b in zip(one.weights(), two.weights(), strict=True):
        assert torch.equal(a, b)
