"""Units under anomaly mode, and units whose gradients are differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import ReplayMismatchError
from tests.unit.counted import expect

WIDTH, UNITS, WARMUP, STEPS = 4, 2, 2, 5
REPLAYED = (STEPS - WARMUP) * UNITS


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


class _NanUnlessZero(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.where(gradient == 0, float("nan"))


class Two(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = _NanUnlessZero.apply(x)  # type: ignore[no-untyped-call]
        return torch.cat([super().forward(x), dropped], dim=1)


class Masking(nn.Module):
    """Drops the half of its unit's results whose gradient would be NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.unit(x)[:, :WIDTH]
        return kept


Loss = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def output(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def plain_loss(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    loss = output(layers, x).square().mean()
    loss.backward()
    return loss


class Training:
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(UNITS))

    def run(self, backward: Loss, graphs: Any = None) -> Iterator[torch.Tensor]:
        """Losses and weights; ``backward`` returns a loss after its backward pass."""
        optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        for number in range(STEPS):
            torch.manual_seed(number)
            optimizer.zero_grad()
            with graphs.step() if graphs is not None else nullcontext():
                loss = backward(self.layers, torch.randn(3, WIDTH, requires_grad=True))
                optimizer.step()
            yield loss.detach()
        yield from (parameter.detach().clone() for parameter in self.layers.parameters())

    def graphs(self, units: str = "*", **options: Any) -> Any:
        return graph_units(self.layers, units, backend="tape", warmup_steps=WARMUP, **options)


def same(eager: Iterable[torch.Tensor], graphed: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(eager, graphed, strict=True))


@pytest.mark.parametrize("verify_interval", [0, 1])
@pytest.mark.parametrize(("kind", "units"), [(Unit, "*"), (Masking, "*.unit")])
def test_anomaly_mode_sees_training_and_no_made_up_gradients(
    kind: Callable[[], nn.Module], units: str, verify_interval: int
) -> None:
    graphed = Training(kind)
    with torch.autograd.set_detect_anomaly(True):
        eager = list(Training(kind).run(plain_loss))
        with graphed.graphs(units, verify_interval=verify_interval) as graphs:
            assert same(eager, graphed.run(plain_loss, graphs))
        expect(graphs.counters, replayed=REPLAYED, mismatched=0)
        assert torch.is_anomaly_enabled()


def test_anomaly_mode_names_a_replay_that_returns_nan() -> None:
    def poisoned(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        output(layers, x).square().mean().mul(float("nan")).backward()
        raise AssertionError("not reached")

    graphed = Training(Unit)
    with graphed.graphs() as graphs:
        list(graphed.run(plain_loss, graphs))
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            list(graphed.run(poisoned, graphs))


def with_graph_of_its_own(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Nobody differentiates the gradients."""
    loss = output(layers, x).square().mean()
    loss.backward(create_graph=True)
    for parameter in layers.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()
    return loss


def penalty(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The incoming gradient of the last unit needs none itself."""
    (gradient,) = torch.autograd.grad(output(layers, x).sum(), x, create_graph=True)
    loss = gradient.square().sum()
    loss.backward()
    return loss


def of_weights(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    output(layers, x).square().mean().backward(create_graph=True)
    weights = list(layers.parameters())
    loss = torch.stack([one.grad.norm() for one in weights if one.grad is not None]).sum()
    loss.backward()
    return loss


def test_gradients_may_have_a_graph_that_nobody_uses() -> None:
    graphed = Training(Unit)
    with graphed.graphs() as graphs:
        found = graphed.run(with_graph_of_its_own, graphs)
        assert same(Training(Unit).run(with_graph_of_its_own), found)
        # A graph of gradients keeps what each unit returned: one eager pass, then copies.
        expect(graphs.counters, replayed=REPLAYED - 2, mismatched=2)


@pytest.mark.parametrize("twice", [penalty, of_weights])
def test_a_second_derivative_names_the_unit_and_what_to_do(twice: Loss) -> None:
    graphed = Training(Unit)
    words = r"^[01]: .*create_graph=True.* Leave the unit out of graph_units\.$"
    with graphed.graphs() as graphs, pytest.raises(ReplayMismatchError, match=words):
        list(graphed.run(twice, graphs))
