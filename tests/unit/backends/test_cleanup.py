"""What is put right after a capture: generators that it left unable to draw."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_cg.backends.base import generators_kept


class InCapture:
    """A generator that a capture has left behind: it draws nothing until it has another state."""

    device = "cpu"

    def __init__(self) -> None:
        self.state, self.in_capture = "before", True

    def get_state(self) -> str:
        return self.state

    def set_state(self, state: str) -> None:
        self.state = state

    def clone_state(self) -> str:
        return f"clone of {self.state}"

    def graphsafe_set_state(self, state: str) -> None:
        self.state, self.in_capture = state, False


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stuck", [False, True])
def test_only_a_generator_that_cannot_draw_leaves_its_capture(
    fails: bool, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uniform(_tensor: torch.Tensor, *, generator: InCapture) -> None:
        if stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    generator: Any = InCapture()
    host = torch.get_rng_state()
    with pytest.raises(LookupError) if fails else nullcontext(), generators_kept([generator]):
        generator.state = "drawn from"
        torch.rand(1)
        if fails:
            raise LookupError
    assert generator.state == "before" and generator.in_capture is not (fails and stuck)
    assert torch.equal(torch.get_rng_state(), host)
