"""A unit with two outputs of which a step uses one: what gets no gradient eagerly gets none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.integrations.standalone import graph_units
from tests.unit.counted import expect

WIDTH, ROWS, WARMUP, STEPS, PASSES = 8, 4, 2, 6, 2
USES = {
    "never": (),
    "in a step before capture": (0,),
    "in some replays": (3, 5),
    "but not in the last step before capture": (0, 2, 3, 4),
}
"""In which steps the loss uses the second output."""


class Unit(nn.Module):
    """Its second output alone depends on ``second`` and on the second input."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first, self.both, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self._inner(x)
        if self.recomputes:  # Autograd's graph does not show which parameters this uses.
            again = checkpoint(self._inner, x, use_reentrant=True)
            assert again is not None
            inner = inner.detach() + again
        return x + self.first(inner), self.second(inner * other)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = torch.tanh(self.both(x))
        return inner


class Network(nn.Module):
    """Units on learned inputs."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.queries, self.others = (nn.Parameter(torch.randn(ROWS, WIDTH)) for _ in range(2))
        self.layers = nn.ModuleList(Unit(recomputes=recomputes) for _ in range(3))

    def forward(self, x: torch.Tensor, *, uses_second: bool) -> torch.Tensor:
        y, others, more = self.queries * 1, self.others * 1, []
        for layer in self.layers:
            y, second = layer(y, others)
            more.append(second)
        loss = (y * x).square().mean()
        return loss + torch.stack(more).mean() if uses_second else loss


def results(
    uses: tuple[int, ...], *, graphed: bool, recomputes: bool, verify: int = 0
) -> Iterator[torch.Tensor | None]:
    """All losses, gradients and parameters of a training run."""
    torch.manual_seed(0)
    model = Network(recomputes=recomputes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    graphs = None
    if graphed:
        graphs = graph_units(
            model, "layers.*", backend="tape", warmup_steps=WARMUP, verify_interval=verify
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        with graphs.step() if graphs is not None else nullcontext():
            for number in range(PASSES):
                x = torch.randn(ROWS, WIDTH)
                # One microbatch of the step may use it and another one not.
                loss = model(x, uses_second=step in uses and number == 1)
                loss.backward()
                yield loss.detach()
        yield from (None if one.grad is None else one.grad.clone() for one in model.parameters())
        optimizer.step()
    yield from model.parameters()
    if graphs is not None:
        graphs.close()
        replays = (STEPS - WARMUP) * PASSES * len(model.layers)
        expect(graphs.counters, replayed=replays, mismatched=0)


@pytest.mark.parametrize("verify_interval", [0, 1])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("uses", USES)
def test_what_only_an_unused_output_needs_gets_no_gradient(
    uses: str, recomputes: bool, verify_interval: int
) -> None:
    eager = list(results(USES[uses], graphed=False, recomputes=recomputes))
    replayed = results(USES[uses], graphed=True, recomputes=recomputes, verify=verify_interval)
    assert any(one is None for one in eager)
    for one, other in zip(eager, replayed, strict=True):
        assert (one is None) is (other is None)
        assert one is None or other is None or torch.equal(one, other)
