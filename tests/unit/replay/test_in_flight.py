"""Which replays may run while others wait for their backward."""

from __future__ import annotations

from typing import Any

import torch

from megatron_cg.replay.in_flight import InFlight
from megatron_cg.replay.unit import Unit


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


UNITS = [Unit(f"unit {index}", torch.nn.Identity(), ()) for index in range(4)]


def replay(
    in_flight: InFlight, index: int, x: torch.Tensor | None = None, then: Any = lambda _: None
) -> torch.Tensor:
    x = torch.ones(2, requires_grad=True) if x is None else x
    output: torch.Tensor = Replay.apply(x)  # type: ignore[no-untyped-call]
    in_flight.begin(index, UNITS[index], (output, None), then)
    return output


def allowed(in_flight: InFlight) -> list[int]:
    return [index for index in range(4) if in_flight.broken(index) is None]


def test_only_later_units_replay_until_the_backward_has_run() -> None:
    in_flight = InFlight()
    assert allowed(in_flight) == [0, 1, 2, 3]
    x = replay(in_flight, 0)
    assert allowed(in_flight) == [1, 2, 3]
    x = replay(in_flight, 2, x)
    assert allowed(in_flight) == [3]
    x.sum().backward()
    assert allowed(in_flight) == [0, 1, 2, 3]


def test_an_output_in_use_is_waited_for_though_no_backward_can_follow() -> None:
    in_flight = InFlight()
    assert allowed(in_flight) == [0, 1, 2, 3]
    x = replay(in_flight, 1)
    kept = x.detach()
    del x
    assert allowed(in_flight) == [2, 3] and kept.shape == (2,)
    found = in_flight.broken(0)
    assert found is not None and "still in use for unit 1" in found.text("unit 0")
    del kept
    assert allowed(in_flight) == [0, 1, 2, 3]


def test_an_output_without_gradient_is_not_waited_for() -> None:
    in_flight = InFlight()
    in_flight.begin(1, UNITS[1], torch.ones(2), lambda _: None)
    assert allowed(in_flight) == [0, 1, 2, 3]


def test_a_replay_that_was_let_go_is_no_obstacle_and_branches_go_backward_in_order() -> None:
    in_flight, began = InFlight(), list[Any]()
    first = replay(in_flight, 0, then=began.append)
    replay(in_flight, 1)
    first.sum().backward()
    assert len(began) == 1 and allowed(in_flight) == [0, 1, 2, 3]
    first, second = replay(in_flight, 0), replay(in_flight, 1)
    (second.sin().cos().sum() + first.sum()).backward()
    assert allowed(in_flight) == [0, 1, 2, 3]
