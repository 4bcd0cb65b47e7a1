"""Which replays may run while others wait for their backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.in_flight import Flight


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def replay(flight: Flight, index: int, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = Replay.apply(x)  # type: ignore[no-untyped-call]
    flight.begin(index, f"unit {index}", (output, None))
    return output


def allowed(flight: Flight) -> list[int]:
    return [index for index in range(4) if flight.broken(index) is None]


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_only_later_units_replay_until_the_backward_has_run() -> None:
    flight = Flight()
    assert allowed(flight) == [0, 1, 2, 3]
    x = replay(flight, 0, leaf())
    assert allowed(flight) == [1, 2, 3]
    x = replay(flight, 2, x)
    assert allowed(flight) == [3]
    x.sum().backward()
    assert allowed(flight) == [0, 1, 2, 3]


def test_a_pass_that_nobody_can_run_backward_is_over() -> None:
    flight = Flight()
    x = replay(flight, 1, leaf())
    kept = x.detach()
    del x
    assert allowed(flight) == [0, 1, 2, 3] and kept.shape == (2,)


def test_an_output_without_gradient_is_not_waited_for() -> None:
    flight = Flight()
    flight.begin(1, "unit 1", torch.ones(2))
    assert allowed(flight) == [0, 1, 2, 3]


def test_a_second_backward_is_an_error() -> None:
    flight = Flight()
    x = replay(flight, 1, leaf())
    x.sum().backward(retain_graph=True)
    with pytest.raises(ReplayMismatchError, match=r"unit 1: its backward runs a second time"):
        x.sum().backward()


def test_a_backward_out_of_order_is_an_error() -> None:
    flight = Flight()
    first, second = replay(flight, 0, leaf()), replay(flight, 1, leaf())
    with pytest.raises(ReplayMismatchError, match=r"unit 0: .* before that of unit 1"):
        first.sum().backward()
    second.sum().backward()


def test_branches_that_meet_in_one_loss_go_backward_in_order() -> None:
    flight = Flight()
    first, second = replay(flight, 0, leaf()), replay(flight, 1, leaf())
    loss = second.sin().cos().sum() + first.sum()
    loss.backward()
    assert allowed(flight) == [0, 1, 2, 3]
