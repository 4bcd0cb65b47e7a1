"""What a unit writes in its forward pass: kept over a capture, or refused where a graph cannot."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import CaptureError
from tests.unit.counted import expect

STEPS, WARMUP, WIDTH = 6, 3, 4


class Following(nn.Module):
    """A moving average of its input, in a buffer or in a frozen parameter."""

    def __init__(self, *, frozen: bool = False, written: bool = True) -> None:
        super().__init__()
        self.linear, self.written = nn.Linear(WIDTH, WIDTH), written
        self.mean: torch.Tensor
        if frozen:
            self.register_parameter("mean", nn.Parameter(torch.zeros(WIDTH), requires_grad=False))
        else:
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) + self.mean
        new = 0.9 * self.mean + 0.1 * (x.detach().mean(0) + 1)
        if self.written:
            self.mean.data.copy_(new)
        else:
            self.mean = new
        return made


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        return made * torch.rand(WIDTH, generator=self.generator, device=x.device)


class Counting(nn.Module):
    """Writes into a state that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) + state
        state.mul_(0.9).add_(x.detach().mean(0))
        return made


class Masked(nn.Module):
    """Reads a mask that others set on it, and keeps its last result for them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) * self.mask
        self.last = made.detach().sum()
        return made


class Network(nn.Module):
    def __init__(self, unit: nn.Module, *more: torch.Tensor) -> None:
        super().__init__()
        self.first, self.unit, self.more = nn.Linear(WIDTH, WIDTH), unit, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.unit(self.first(x), *self.more)
        return made


def train(
    unit: nn.Module, *more: torch.Tensor, captured: int = 1, **options: Any
) -> list[torch.Tensor]:
    """Losses and what the unit has in the end, with graphs if there are ``options``."""
    torch.manual_seed(0)
    network = Network(unit, *more)
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    graphs: Any = graph_units(network, ["unit"], **options) if options else None
    losses = []
    with graphs or nullcontext():
        for step in range(STEPS):
            with graphs.step() if graphs else nullcontext():
                optimizer.zero_grad()
                loss = network(torch.arange(2.0 * WIDTH).view(2, WIDTH).add(step).sin()).sum()
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
        if graphs:
            replayed = captured * (STEPS - WARMUP)
            expect(graphs.counters, captured=captured, replayed=replayed, mismatched=0)
    return [*losses, *unit.state_dict().values()]


@pytest.mark.parametrize("options", [{}, {"verify_interval": 1}], ids=["", "verified"])
@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen parameter"])
def test_what_a_unit_writes_into_is_as_before_the_capture(
    frozen: bool, options: dict[str, Any]
) -> None:
    torch.use_deterministic_algorithms(True)
    expected = train(Following(frozen=frozen))
    found = train(Following(frozen=frozen), backend="tape", warmup_steps=WARMUP, **options)
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, expected, found))


def test_a_generator_of_a_unit_is_as_before_the_capture() -> None:
    found = train(Noisy(), backend="tape", warmup_steps=WARMUP)
    assert all(map(torch.equal, train(Noisy()), found))


def test_a_buffer_that_becomes_another_tensor_is_refused_and_kept() -> None:
    unit = Following(written=False)
    before: list[torch.Tensor] = []
    unit.register_forward_hook(lambda *_: before.append(unit.mean))
    with pytest.raises(CaptureError, match=r"replaces its buffer mean .*self\.mean\.copy_"):
        train(unit, backend="tape", warmup_steps=WARMUP)
    assert len(before) == WARMUP and unit.mean is before[-1]


def test_training_goes_on_without_such_a_graph_where_asked_for() -> None:
    options = {"backend": "tape", "warmup_steps": WARMUP, "on_failure": "eager"}
    found = train(Following(written=False), captured=0, **options)
    assert all(map(torch.equal, train(Following(written=False)), found))


def test_a_number_that_becomes_a_tensor_in_the_pass_is_no_state() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(rows) * torch.tensor(0.5)
            return made

    found = train(Scaled(), backend="tape", warmup_steps=WARMUP)
    assert all(map(torch.equal, train(Scaled()), found))


def test_an_input_that_is_written_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes into its argument state"):
        train(Counting(), torch.zeros(WIDTH), backend="tape", warmup_steps=WARMUP)


def test_a_first_input_that_is_written_is_named() -> None:
    class Scaled(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.mul_(2)

    network = nn.Sequential(Scaled(), nn.Linear(WIDTH, 1))
    with (
        graph_units(network, ["0"], warmup_steps=1, backend="tape") as graphs,
        pytest.raises(CaptureError, match="writes into its argument rows"),
    ):
        for _ in range(2):
            with graphs.step():
                network(torch.ones(2, WIDTH)).sum().backward()


def test_a_tensor_that_others_set_on_a_unit_is_used_at_once() -> None:
    torch.manual_seed(0)
    unit, x = Masked(), torch.ones(2, WIDTH)
    with graph_units(nn.Sequential(unit), ["0"], warmup_steps=1, backend="tape") as graphs:
        for _ in range(3):
            with graphs.step():
                unit(x).sum().backward()
        expect(graphs.counters, replayed=2, mismatched=0)
        old, unit.mask = unit.mask, torch.zeros(WIDTH)
        with graphs.step():
            assert not unit(x).any() and old.all()
        unit.mask = old
        with graphs.step():
            unit(x).sum().backward()
        expect(graphs.counters, replayed=3, mismatched=1, eager=1)
