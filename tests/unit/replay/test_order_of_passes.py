"""Which replays may run while others wait for their backward, and which backward is an error."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.guarded_graph import InFlight
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.tools.record.record import parameter_digests
from tests.unit.replay.test_own_gradients import Replay, graphed
from tests.unit.trainers import compared

pytestmark = pytest.mark.fault


@pytest.fixture
def trainer(one_rank: None) -> Any:
    with graphed() as made:
        yield made


def contrasted(trainer: Any) -> float:
    """Two forward passes before one backward pass, as in losses of preferences."""
    trainer._optimizer.zero_grad()
    first, second = (trainer._forward() for _ in range(2))
    (first.sum() - second.sum()).sigmoid().backward()
    trainer._fsdp.finish_grad_sync()
    trainer._fsdp.scale_gradients(1.0 / first.numel())
    return float(first.sum() - second.sum())


@pytest.mark.parametrize("experts", [0, 4])
def test_of_two_passes_before_a_backward_pass_the_second_runs_eagerly(
    experts: int, one_rank: None
) -> None:
    scopes = ("attn", "moe_router", "moe_preprocess") if experts else ("attn", "mlp")

    def act(trainer: Any) -> list[Any]:
        trainer._passes = partial(contrasted, trainer)
        return [*(trainer.step() for _ in range(3)), parameter_digests(trainer.model)]

    shape = CpuModelConfig(layers=2, experts=experts, graph_modules=scopes)
    eager, graphed, counts = compared(act, shape)
    assert eager == graphed and counts["replayed"] == counts["eager"] == 3 * 2


def layers_of_one_pass(trainer: Any) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for unit in trainer.session.units:
            hook = unit.layer.register_forward_hook(lambda _, __, out: kept.append(out[0]))
            hooks.enter_context(hook)
        trainer._forward()
    return [output.sum() for output in kept]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        pytest.param((0,), "layer 0: its backward .* cuts layer 1 off", id="before"),
        pytest.param((1, 1), "or a second time", id="twice"),
    ],
)
def test_a_pass_out_of_order_is_an_error(trainer: Any, order: tuple[int, ...], words: str) -> None:
    made = layers_of_one_pass(trainer)
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
