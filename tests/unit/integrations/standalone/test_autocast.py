"""Units under autocast: each pass is captured under the one around it in eager training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg import graph_units
from megatron_cg.errors import ConfigurationError, ReplayMismatchError
from tests.unit.counted import expect

WIDTH, UNITS, WARMUP, STEPS = 8, 2, 2, 5
PLACES = ("around the step", "inside the step", "forward", "backward")
"""Where a training loop enters autocast; all but the third are around backward passes."""


def autocast(dtype: torch.dtype | None = torch.bfloat16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(x))
        return out


class Island(Unit):
    """A router in float32, as mixtures of experts have one; its two results are reached apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(None):
            scores = torch.tanh(self.linear(x.float()))
        out: torch.Tensor = x + scores * self.linear(x)
        return out


class Twice(Unit):
    """Autocast casts its weight once, and sums the gradients of both uses in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Recomputes(Twice):
    """Checkpointing enters the autocast of the forward pass again, with its cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class _Product(torch.autograd.Function):
    """Its backward pass computes in float32, unless autocast casts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return gradient.float() @ weight.t(), x.t() @ gradient.float()


class Own(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self.linear.weight)  # type: ignore[no-untyped-call]
        return x + torch.tanh(out)


KINDS = (Unit, Island, Twice, Recomputes, Own)


class Training:
    """One model and its steps, with autocast in the named places."""

    def __init__(self, kind: Callable[[], nn.Module], *places: str) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(UNITS))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.places = places

    def at(self, place: str) -> AbstractContextManager[Any]:
        return autocast() if place in self.places else nullcontext()

    def run(self, graphs: Any) -> Iterator[torch.Tensor]:
        """Losses and weights."""
        for number in range(STEPS):
            self.optimizer.zero_grad()
            torch.manual_seed(number)
            with self.at(PLACES[0]), graphs.step() if graphs else nullcontext(), self.at(PLACES[1]):
                x = torch.randn(4, WIDTH)
                with self.at("forward"):
                    for layer in self.layers:
                        x = layer(x)
                loss = x.float().square().mean()
                with self.at("backward"):
                    loss.backward()
                self.optimizer.step()
            yield loss.detach()
        yield from (parameter.detach().clone() for parameter in self.layers.parameters())

    def graphs(self, **options: Any) -> Any:
        return graph_units(self.layers, "*", backend="tape", warmup_steps=WARMUP, **options)


def same(eager: Iterable[torch.Tensor], graphed: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(eager, graphed, strict=True))


@pytest.mark.parametrize("verify_interval", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_is_captured_under_its_own_autocast(
    kind: type[Unit], verify_interval: int
) -> None:
    graphed = Training(kind, "forward")
    with graphed.graphs(verify_interval=verify_interval) as graphs:
        found = list(graphed.run(graphs))
        expect(graphs.counters, replayed=(STEPS - WARMUP) * UNITS, mismatched=0)
    assert same(Training(kind, "forward").run(None), found)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "forward"])
def test_a_backward_pass_under_autocast_is_refused(place: str) -> None:
    training = Training(Unit, place)
    with (
        training.graphs() as graphs,
        pytest.raises(ConfigurationError, match=r"unit-autocast\].*outside of torch.autocast"),
    ):
        list(training.run(graphs))


@pytest.mark.parametrize("place", PLACES)
def test_a_step_in_another_precision_is_no_step_of_these_graphs(place: str) -> None:
    """An eager pass follows a forward pass in another precision; none can follow a replay."""
    eager, graphed = Training(Island), Training(Island)
    with graphed.graphs() as graphs:
        list(graphed.run(graphs))
        list(eager.run(None))
        eager.places = graphed.places = (place,)
        if place == "backward":
            with pytest.raises(ReplayMismatchError, match="cpu in the backward pass was off"):
                list(graphed.run(graphs))
            return
        found = list(graphed.run(graphs))
        expect(graphs.counters, mismatched=STEPS * UNITS)
    assert same(eager.run(None), found)


class UnderItsOwn(Unit):
    """Enters autocast outside of the unit below it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None
        self.inner = Island()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.dtype):
            out: torch.Tensor = self.inner(x)
        return out.float()


def test_units_may_run_under_different_autocast() -> None:
    losses = []
    for graphed in (False, True):
        training: Any = Training(UnderItsOwn)
        training.layers[1].dtype = torch.bfloat16
        graphs = graph_units(training.layers, "*.inner", backend="tape") if graphed else None
        losses.append(list(training.run(graphs)))
        if graphs is not None:
            graphs.close()
            expect(graphs.counters, replayed=(STEPS - 3) * UNITS, mismatched=0)
    assert same(*losses)


class Sharing(Training):
    """Two units with one weight, or one unit that is called twice."""

    def __init__(self, *places: str, twice: bool, cache: bool = True) -> None:
        super().__init__(Unit, *places)
        first, second = (vars(layer)["_modules"]["linear"] for layer in self.layers)
        self.cache = cache
        if not twice:
            second.weight = first.weight
        else:
            self.layers = nn.ModuleList(list(self.layers)[:1] * 2)

    def at(self, place: str) -> AbstractContextManager[Any]:
        on = torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cache)
        return on if place in self.places else nullcontext()


@pytest.mark.parametrize("twice", [False, True])
def test_a_cast_that_two_calls_share_is_refused(twice: bool) -> None:
    training = Sharing("forward", twice=twice)
    words = r"unit-shared-gradients\] unit [01]: a weight that .*cache_enabled=False"
    with (
        graph_units(training.layers, "*", backend="tape", warmup_steps=WARMUP) as graphs,
        pytest.raises(ConfigurationError, match=words),
    ):
        list(training.run(graphs))


@pytest.mark.parametrize("places", [(), ("forward",)])
@pytest.mark.parametrize("twice", [False, True])
def test_weights_may_be_shared_without_shared_casts(twice: bool, places: tuple[str, ...]) -> None:
    graphed = Sharing(*places, twice=twice, cache=False)
    with graphed.graphs() as graphs:
        found = list(graphed.run(graphs))
        assert graphs.counters.replayed > 0
    assert same(Sharing(*places, twice=twice, cache=False).run(None), found)
