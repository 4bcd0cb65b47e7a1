"""The native backend trains the eager numbers, on the double of ``torch.cuda``."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.backends.cuda_double import OnCpu, cuda_double
from tests.unit.counted import expect


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.ReLU()) for _ in range(3))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("verify", [0, 1])
def test_units_of_a_plain_module_train_the_same_numbers(one_rank: None, verify: int) -> None:
    from megatron_cg import graph_units

    numbers: dict[bool, list[Any]] = {}
    for graphed in (False, True):
        with cuda_double(fakes=False) as cuda:
            model = Stack()
            made: Any = nullcontext()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            graphs: Any = None
            if graphed:
                policy: Any = {"verify_interval": verify, "on_mismatch": "error"}
                made = graphs = graph_units(model, ["layers.*"], backend=OnCpu(), **policy)
            torch.manual_seed(7)
            numbers[graphed] = []
            with made:
                for step in range(6):
                    with graphs.step() if graphed else nullcontext():
                        optimizer.zero_grad()
                        inputs = torch.full((2, 4), 1.0 + step)
                        loss = model(inputs).square().sum()
                        loss.backward()
                        optimizer.step()
                    numbers[graphed].append(loss.detach().clone())
            if graphed:
                expect(graphs.counters, captured=3, replayed=9, eager=0, verified=9 * verify)
                # No graph may be destroyed while one replays.
                assert all(graph.resets and not graph.reset_among for graph in cuda.graphs)
            numbers[graphed] += [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, numbers[True], numbers[False]))
