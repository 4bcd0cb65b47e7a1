"""Which replays may run while others wait for their backward, and which backward is an error."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.guarded_graph import InFlight
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.replay.test_own_gradients import Replay
from tests.unit.trainers import trainer_of

pytestmark = pytest.mark.fault
AGAIN = "after another forward replay of the same graph"


@pytest.fixture
def trainer(one_rank: None) -> Any:
    with trainer_of(CpuModelConfig(layers=2), graphs=True) as made:
        made.step()
        made.capture(TapeBackend())
        yield made


def two_passes(trainer: Any) -> list[torch.Tensor]:
    return [trainer._forward().sum() for _ in range(2)]


def layers_of_one_pass(trainer: Any) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for unit in trainer.session.units:
            hook = unit.layer.register_forward_hook(lambda _, __, out: kept.append(out[0]))
            hooks.enter_context(hook)
        trainer._forward()
    return [output.sum() for output in kept]


@pytest.mark.parametrize(
    ("losses", "order", "words"),
    [
        pytest.param(two_passes, (1, 0), AGAIN, id="in_reverse"),
        pytest.param(two_passes, (0, 1), AGAIN, id="as_they_came"),
        pytest.param(two_passes, (0,), AGAIN, id="another_between"),
        pytest.param(layers_of_one_pass, (0,), "layer 0: its backward .* of layer 1", id="before"),
        pytest.param(layers_of_one_pass, (1, 1), "or a second time", id="twice"),
    ],
)
def test_a_pass_out_of_order_is_an_error(
    trainer: Any, losses: Callable[[Any], list[torch.Tensor]], order: tuple[int, ...], words: str
) -> None:
    made = losses(trainer)
    with pytest.raises(ReplayMismatchError, match=words):
        for number in order:
            made[number].backward(retain_graph=True)


def test_only_later_units_replay_until_the_backward_has_run_or_cannot() -> None:
    in_flight, began = InFlight(), list[int]()
    units = [Unit(f"unit {index}", torch.nn.Identity(), ()) for index in range(4)]

    def replay(index: int, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.ones(2, requires_grad=True) if x is None else x
        output: torch.Tensor = Replay.apply(x)  # type: ignore[no-untyped-call]
        in_flight.begin(index, units[index], (output, None), lambda _: began.append(index))
        return output

    def allowed() -> list[int]:
        return [index for index in range(4) if in_flight.broken(index) is None]

    assert allowed() == [0, 1, 2, 3]
    x = replay(0)
    assert allowed() == [1, 2, 3]
    loss = replay(2, x).sum()
    del x  # Only nodes of autograd are left.
    assert allowed() == [3]
    loss.backward()
    assert allowed() == [0, 1, 2, 3] and began == [2, 0]
    x = replay(1)
    kept = x.detach()
    del x
    assert allowed() == [2, 3] and kept.shape == (2,)
    found = in_flight.broken(0)
    assert found is not None and "still in use for unit 1" in found.text("unit 0")
    del kept
    first = replay(0)
    replay(1)  # Nobody keeps its output.
    first.sum().backward()
    assert allowed() == [0, 1, 2, 3] and began == [2, 0, 0]
    replay(1, replay(0)).sum().backward()
    assert began == [2, 0, 0, 1, 0]
