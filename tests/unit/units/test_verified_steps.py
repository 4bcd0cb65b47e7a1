"""Steps of ``graph_units`` that are trained twice: what is restored, and what is found."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from megatron_cg.errors import ConfigurationError, ReplayMismatchError
from megatron_cg.integrations.repeated_step import _modules
from megatron_cg.tape.train import build
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.units.graphs import clears_of
from tests.unit.units import plain
from tests.unit.units.plain import Training, Unit, in_turn, same, units

pytestmark = pytest.mark.usefixtures("one_rank")


class Counting(Unit):
    """State of a unit: a sum in place, a buffer that is rebound, a frozen weight, and a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = torch.nn.Buffer(torch.zeros(plain.WIDTH))
        self.dropout = torch.nn.Dropout(0.1)
        self.mean = torch.nn.Parameter(torch.zeros(plain.WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.detach().sum(0)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        out: torch.Tensor = self.dropout(super().forward(x)) + self.total + self.mean
        return out


def passes(training: Training, x: torch.Tensor, fault: Callable[[Any], object]) -> torch.Tensor:
    """Two passes whose gradients add to those of before, around a count that is rebound."""
    model, (norm, scale) = training.model, AROUND
    total = torch.zeros(())
    for _ in range(2):
        model.seen = model.seen + 1
        out = in_turn(model, x)
        out = (out + norm(out) * scale) * (1 + model.seen / 8)
        fault(out)
        loss = out.square().mean()
        loss.backward()
        total += loss.detach()
    return total


def add_gradient(bias: Any) -> None:
    SUM.add_(bias.grad)


SUM = torch.zeros(plain.WIDTH)  # Of gradients, which a model of Megatron keeps in its buffers.
AROUND: list[Any] = []
"""A module and a leaf that are not the model's: gradients and buffers."""


def train(on_mismatch: str | None, fault: Callable[[Any, Any], object], step: int) -> Any:
    def counting() -> Any:
        model: Any = units(Counting)
        model.register_buffer("seen", torch.zeros(()))
        return model

    def fault_now(out: Any) -> None:
        session = graphs.session if graphs is not None else None
        if (
            training.step == step
            and session is not None
            and not session.mismatches.conditions.all_eager
        ):
            fault(training.model, out)

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        in_turn(run.model, x.detach()).square().sum().backward()  # outside of what is verified
        SUM.zero_()
        verified = partial(passes, run, x.detach(), fault_now)
        return verified() if graphs is None else graphs.verified(verified)

    training = Training(counting, microbatch)
    AROUND[:] = torch.nn.BatchNorm1d(plain.WIDTH), torch.ones((), requires_grad=True)
    AROUND[0].zero_grad_buffer = SUM.zero_
    AROUND[0].bias.register_post_accumulate_grad_hook(add_gradient)
    options: Any = {"verify_steps": 1, "verify_interval": 1, "on_mismatch": on_mismatch}
    graphs = training.graphs(**options) if on_mismatch else None
    with graphs if graphs is not None else nullcontext():
        numbers = list(training.run(graphs))
    numbers += [*AROUND[0].buffers(), AROUND[0].weight.grad, AROUND[1].grad, SUM.clone()]
    return numbers, graphs.counters.as_dict() if graphs is not None else {}


def nothing(*_: Any) -> None:
    """No fault."""


FAULTS: dict[str, Callable[[Any, Any], object]] = {
    "gradient outside, of shape": lambda _model, out: out.register_hook(lambda one: 2 * one),
    r"gradient 1\.linear": lambda _model, out: out.register_hook(lambda gradient: 2 * gradient),
    r"buffer 0\.total": lambda model, _out: model[0].total.add_(1),
    "buffer seen": lambda model, _out: model.seen.add_(1),
    "random state of the host": lambda *_: torch.rand(()),
}


def test_verified_steps_train_as_eager_ones() -> None:
    expected, _ = train(None, nothing, 0)
    found, counts = train("error", nothing, 0)
    assert same(found, expected) and counts["steps_verified"] == plain.STEPS - plain.WARMUP
    assert counts["replayed"] > plain.UNITS and counts["mismatched"] == counts["eager"] == 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_training_goes_on_as_eagerly(name: str) -> None:
    with pytest.raises(ReplayMismatchError, match=name):
        train("error", FAULTS[name], plain.WARMUP + 1)
    found, counts = train("eager", FAULTS[name], plain.WARMUP + 1)
    assert same(found, train(None, nothing, 0)[0]) and counts["steps_differed"] == 1


def test_a_step_that_changes_what_is_not_restored_is_told_so(deterministic: None) -> None:
    numbers = count(1)

    def microbatch(run: Training, x: torch.Tensor) -> Any:
        return graphs.verified(lambda: plain.train(run, x.detach() * next(numbers)))

    training = Training(microbatch=microbatch)
    told = pytest.raises(ReplayMismatchError, match="Two eager trainings of it differ too")
    with training.graphs(verify_steps=1, on_mismatch="error") as graphs, told:
        list(training.run(graphs))


def test_a_step_that_is_due_gives_its_passes_to_verified() -> None:
    training = Training()
    with (
        training.graphs(verify_steps=1) as graphs,
        pytest.raises(ConfigurationError, match=r"graphs\.verified\(lambda: train\(batch\)\)"),
    ):
        list(training.run(graphs))


def test_state_in_megatron_fsdp_is_found_and_gradients_from_before_are_refused() -> None:
    fsdp = build(CpuModelConfig(layers=1, hidden_size=16)).module
    assert {*dict(_modules([fsdp])).values()} == {*fsdp.modules()} - {fsdp}
    fsdp.param_and_grad_buffer.parameter_groups[0].main_grad_buffer.data[0] = 1
    with pytest.raises(ConfigurationError, match=r"has gradients from before graphs\.verified"):
        list(clears_of([fsdp]))
