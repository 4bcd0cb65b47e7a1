"""Which replays may run while others wait for their backward."""

from __future__ import annotations

from typing import Any

import torch

from megatron_cg.replay.in_flight import InFlight
from megatron_cg.replay.unit import Unit

UNITS = [Unit(f"unit {index}", torch.nn.Identity(), ()) for index in range(4)]


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_only_later_units_replay_until_the_backward_has_run_or_cannot() -> None:
    in_flight, began = InFlight(), list[int]()

    def replay(index: int, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.ones(2, requires_grad=True) if x is None else x
        output: torch.Tensor = Replay.apply(x)  # type: ignore[no-untyped-call]
        in_flight.begin(index, UNITS[index], (output, None), lambda _: began.append(index))
        return output

    def allowed() -> list[int]:
        return [index for index in range(4) if in_flight.broken(index) is None]

    assert allowed() == [0, 1, 2, 3]
    x = replay(0)
    assert allowed() == [1, 2, 3]
    x = replay(2, x)  # Nothing but a node of autograd is left of the output of unit 0.
    assert allowed() == [3]
    x.sum().backward()
    assert allowed() == [0, 1, 2, 3] and began == [2, 0]
    x = replay(1)
    kept = x.detach()
    del x
    assert allowed() == [2, 3] and kept.shape == (2,)
    del kept
    first = replay(0)
    replay(1)  # let go
    first.sum().backward()
    assert allowed() == [0, 1, 2, 3] and began == [2, 0, 0]
