"""Detached weights with a fake of gradient bucketing, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import FastPathError, UpstreamChangedError
from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, detach_in
from tests.unit.fastpath.bucketing_doubles import Bucketing, hook_weights
from tests.unit.fastpath.test_detached import PARTS, WIDTH, Grouped

PLACE, NAME = sys.modules[Grouped.__module__], "_Grouped"


def function() -> Any:
    """What the modules' forward passes look up."""
    return getattr(PLACE, NAME)


def rows() -> torch.Tensor:
    return torch.arange(float(PARTS * WIDTH)).reshape(PARTS, WIDTH).sin().requires_grad_()


@pytest.fixture
def module() -> Grouped:
    torch.manual_seed(0)
    found = Grouped()
    hook_weights(found.parameters())
    return found


@pytest.fixture
def bucketing() -> Bucketing:
    return Bucketing()


@pytest.fixture
def detach(bucketing: Bucketing) -> Iterator[Callable[[nn.Module], Callable[[], None]]]:
    """Detaches a module's weights; undone at the test's end."""
    undo = ExitStack()

    def hiding(module: nn.Module) -> Callable[[], None]:
        detached = DetachedWeights(nn.Sequential(module), bucketing)  # type: ignore[arg-type]
        undo.callback(detach_in(PLACE, NAME, detached))
        return undo.close

    yield hiding
    undo.close()


Detach = Callable[[nn.Module], Callable[[], None]]


def test_each_backward_pass_is_handed_over_and_none_after_the_undo(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    undo = detach(module)
    weights = list(module.parameters())
    # Two microbatches on their way at once, as in a pipeline.
    first, second = module(rows())[0].sum(), module(rows())[0].sum()
    first.backward()
    assert len(bucketing.taken) == 1
    second.backward()
    assert len(bucketing.taken) == 2 and all(weight.grad is None for weight in weights)
    assert len(bucketing.detached) == PARTS
    with torch.no_grad():
        module(rows())
    undo()
    assert bucketing.detached == [] and isinstance(function(), type)
    module(rows())[0].sum().backward()
    assert len(bucketing.taken) == 2 and weights[0].grad is not None


def test_a_pass_that_names_its_inputs_is_refused(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    detach(module)
    given, weights = rows(), list(module.parameters())
    for named in ([given], [given, weights[0]]):
        with pytest.raises(FastPathError, match="names its inputs"):
            module(given)[0].sum().backward(inputs=named)
        with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
            torch.autograd.grad(module(given)[0].sum(), named, allow_unused=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(module(given)[0].sum(), weights[:1])
    assert bucketing.taken == [] and all(weight.grad is None for weight in weights)


def test_what_is_handed_over_are_the_gradients_in_the_weights_order(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    module(rows())[0].square().sum().backward()
    expected = [weight.grad for weight in module.parameters()]
    detach(module)
    given = rows()
    module(given)[0].square().sum().backward()
    assert given.grad is not None
    ((found, used),) = bucketing.taken
    assert used == [False] * PARTS
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and torch.equal(ours, theirs)


def test_two_calls_of_one_pass_are_handed_over_as_a_sum(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    (module(rows())[0].sum() + module(rows() * 2)[0].square().sum()).backward()
    expected = [weight.grad for weight in module.parameters()]
    detach(module)
    (module(rows())[0].sum() + module(rows() * 2)[0].square().sum()).backward()
    ((found, _),) = bucketing.taken
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and torch.equal(ours, theirs)


def test_a_pass_that_failed_between_two_calls_leaves_nothing(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    detach(module)

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("refused")

    first = module(rows())[0]
    middle = first.tanh()
    middle.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        module(middle)[0].sum().backward()
    assert bucketing.taken == []
    del first, middle
    module(rows())[0].sum().backward()
    ((found, _),) = bucketing.taken
    expected = rows().chunk(PARTS)
    assert torch.equal(found[0], torch.ones(1, WIDTH).t() @ expected[0])


def test_the_weights_that_are_used_beside_are_named(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    detach(module)
    weights = list(module.parameters())
    (module(rows())[0].sum() + weights[2].sum()).backward()
    ((_, used),) = bucketing.taken
    assert used == [place == 2 for place in range(PARTS)]
    module(rows())[0].sum().backward()
    assert bucketing.taken[1][1] == [False] * PARTS


def hooked(module: Any) -> None:
    module.weight1.register_hook(lambda gradient: gradient * 2)


def hooked_after(module: Any) -> None:
    module.weight1.register_post_accumulate_grad_hook(lambda _: None)


def frozen(module: Any) -> None:
    module.weight1.requires_grad_(False)


def computed_later(module: Any) -> None:
    module.weight1.skip_backward_post_hook = True


@pytest.mark.parametrize("change", [hooked, hooked_after, computed_later])
def test_weights_that_are_more_than_weights_are_left_to_autograd(
    module: Grouped, bucketing: Bucketing, detach: Detach, change: Callable[[Any], None]
) -> None:
    detach(module)
    module(rows())[0].sum().backward()
    assert len(bucketing.taken) == 1
    change(module)
    module(rows())[0].sum().backward()
    assert len(bucketing.taken) == 1


@pytest.mark.parametrize("change", [hooked, hooked_after, computed_later])
def test_weights_that_change_between_the_passes_end_the_run(
    module: Grouped, bucketing: Bucketing, detach: Detach, change: Callable[[Any], None]
) -> None:
    detach(module)
    loss = module(rows())[0].sum()
    change(module)
    with pytest.raises(FastPathError, match="after the forward pass"):
        loss.backward()
    assert bucketing.taken == []


def test_only_what_needs_a_gradient_is_detached(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    detach(module)
    frozen(module)
    module(rows())[0].sum().backward()
    ((found, _),) = bucketing.taken
    assert len(found) == PARTS - 1 and all(w.grad is None for w in module.parameters())


def test_weights_that_nobody_takes_or_that_are_few_are_left_to_autograd(
    module: Grouped, bucketing: Bucketing, detach: Detach, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach(module)
    with monkeypatch.context() as patch:
        patch.setattr(bucketing, "knows", lambda one: one is not module.weight5)
        module(rows())[0].sum().backward()
    for number in range(3):
        module.get_parameter(f"weight{number}").requires_grad_(False)
    module(rows())[0].sum().backward()
    assert bucketing.taken == [] and module.weight5.grad is not None


def test_calls_without_a_backward_pass_are_not_kept(module: Grouped, bucketing: Bucketing) -> None:
    detached = DetachedWeights(nn.Sequential(module), bucketing)  # type: ignore[arg-type]
    undo = detach_in(PLACE, NAME, detached)
    for _ in range(10):
        module(rows())
    to_come: Any = bucketing.to_come
    assert not to_come() and len(to_come.__self__._calls) == 1
    undo()


def test_a_weight_that_an_operation_has_twice_is_left_to_autograd(
    module: Grouped, bucketing: Bucketing, detach: Detach
) -> None:
    module._parameters["weight5"] = module._parameters["weight0"]
    detach(module)
    module(rows())[0].sum().backward()
    assert bucketing.taken == [] and all(w.grad is not None for w in module.parameters())


def test_a_function_whose_weights_are_not_last_is_refused(bucketing: Bucketing) -> None:
    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: Any, weight: Any) -> Any: ...

    detached = DetachedWeights(nn.Sequential(), bucketing)  # type: ignore[arg-type]
    place = SimpleNamespace(Fixed=Fixed)
    with pytest.raises(UpstreamChangedError, match="weights come last"):
        detach_in(place, "Fixed", detached)
    assert place.Fixed is Fixed


def test_two_models_share_the_stand_in_and_leave_in_any_order(
    module: Grouped, bucketing: Bucketing
) -> None:
    other, own = Grouped(), function()
    models = [nn.Sequential(module), nn.Sequential(other)]
    undo = [
        detach_in(PLACE, NAME, DetachedWeights(model, bucketing))  # type: ignore[arg-type]
        for model in models
    ]
    module(rows())[0].sum().backward()
    assert len(bucketing.taken) == 1
    undo[0]()
    module(rows())[0].sum().backward()
    assert len(bucketing.taken) == 1 and function() is not own
    undo[1]()
    assert function() is own
