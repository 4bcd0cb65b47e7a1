"""Calls of a function whose weights are detached: which weights, and how often in one pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.fastpath.gradients.detached_weights import MANY, DetachedWeights, detach_in
from tests.unit.fastpath.bucketing_doubles import Bucketing, hook_weights

WIDTH = 3


class _Scaled(torch.autograd.Function):
    """Rows times the sum of all weights and biases; ``None`` as well stands for a bias."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor | None) -> Any:
        context.save_for_backward(rows, *weights)
        return rows * sum(weight for weight in weights if weight is not None)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        rows, *weights = context.saved_tensors
        into = gradient * rows
        # Each has a gradient of its own, those that need none among them.
        each = [None if w is None else into * (2 + place) for place, w in enumerate(weights)]
        for place in Scaled.without:
            each[place] = None
        return gradient * sum(weight for weight in weights if weight is not None), *each


class Scaled(nn.Module):
    """Some weights, and what else comes last; places in ``without`` get no gradient."""

    without: tuple[int, ...] = ()

    def __init__(self, weights: int = MANY) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(weights))
        hook_weights(self.weights)
        self.order: list[Any] = list(self.weights)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., Any] = _Scaled.apply
        output: torch.Tensor = apply(rows, *self.order)
        return output


class ByWeight(Bucketing):
    """Keeps gradients by the weight that they are handed over for."""

    def take_detached(self, weights: list[Any], gradients: Any, used: Any, **how: Any) -> None:
        self.taken.append(dict(zip(weights, gradients, strict=True)))


class Case:
    def __init__(self, module: Scaled) -> None:
        self.module, self.bucketing = module, ByWeight()
        self.detached = DetachedWeights(nn.Sequential(module), self.bucketing)  # type: ignore[arg-type]

    @property
    def before(self) -> dict[int, Any]:
        (weights,) = self.detached._of.values()
        return weights._before

    def is_taken(self, *passes: Any) -> bool:
        """Whether those are the gradients of all passes so far, by weight."""
        taken = self.bucketing.taken
        return len(taken) == len(passes) and all(
            ours.keys() == theirs.keys() and all(map(same, ours.values(), theirs.values()))
            for ours, theirs in zip(taken, passes, strict=True)
        )


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def of_autograd(run: Callable[[], None], module: Scaled) -> list[dict[Any, torch.Tensor | None]]:
    """What the hooks of all weights find as autograd runs them, one pass after the other."""
    found: list[dict[Any, torch.Tensor | None]] = []

    def note(weight: torch.Tensor) -> None:
        if not found or weight in found[-1]:
            found.append({})
        found[-1][weight] = weight.grad
        weight.grad = None

    hooks = [w.register_post_accumulate_grad_hook(note) for w in module.weights if w.requires_grad]
    run()
    for hook in hooks:
        hook.remove()
    for one in found:
        # In the operation's order, and with those that got none.
        left = {w: one.get(w) for w in module.order if isinstance(w, nn.Parameter)}
        one.clear()
        one.update((w, gradient) for w, gradient in left.items() if w.requires_grad)
    return found


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    own = _Scaled
    with ExitStack() as stack:
        yield stack
    assert _Scaled is own


def detach(case: Case, undo: ExitStack) -> None:
    undo.callback(detach_in(sys.modules[__name__], "_Scaled", case.detached))


def rows(scale: float = 1.0) -> torch.Tensor:
    return torch.linspace(-1.0, scale, WIDTH).requires_grad_()


def made(weights: int = MANY) -> Case:
    torch.manual_seed(0)
    return Case(Scaled(weights))


@pytest.mark.parametrize(("weights", "detached"), [(MANY - 1, False), (MANY, True)])
def test_many_weights_are_detached_and_few_are_not(
    weights: int, detached: bool, undo: ExitStack
) -> None:
    case = made(weights)
    detach(case, undo)
    case.module(rows()).sum().backward()
    assert len(case.bucketing.taken) == detached
    assert all((weight.grad is None) == detached for weight in case.module.weights)


def test_a_weight_that_nobody_waits_for_is_left_to_autograd(undo: ExitStack) -> None:
    case = made()
    case.module.weights[2]._post_accumulate_grad_hooks.clear()
    detach(case, undo)
    case.module(rows()).sum().backward()
    assert case.bucketing.taken == [] and case.module.weights[2].grad is not None


def constants(module: Scaled) -> list[Any]:
    """Biases that no gradient is asked of, before, between and after the weights."""
    first, second, *others = module.weights
    return [torch.ones(WIDTH), first, None, second, torch.ones(WIDTH), *others, None]


def trained(module: Scaled) -> list[Any]:
    """Biases that are parameters, each after its weight, as none of Megatron-FSDP's would be."""
    return [one for pair in zip(module.weights[::2], module.weights[1::2], strict=True)
            for one in pair]  # fmt: skip


def one_frozen(module: Scaled) -> list[Any]:
    module.weights[0].requires_grad_(False)
    return list(module.weights)


@pytest.mark.parametrize("order", [constants, trained, one_frozen])
def test_gradients_are_those_of_their_places(
    order: Callable[[Scaled], list[Any]], undo: ExitStack
) -> None:
    case = made(MANY + 2)
    case.module.order = order(case.module)

    def run() -> None:
        case.module(rows()).square().sum().backward()

    expected = of_autograd(run, case.module)
    detach(case, undo)
    run()
    assert case.is_taken(*expected)
    assert all(weight.grad is None for weight in case.module.weights)


def swapped(module: Scaled) -> None:
    """The same first weight, and others in another order."""
    first, second, third, *others = module.weights
    module.order = [first, third, second, *others]


def frozen(module: Scaled) -> None:
    module.weights[2].requires_grad_(False)


@pytest.mark.parametrize("change", [swapped, frozen])
def test_weights_that_are_others_are_detached_anew(
    change: Callable[[Scaled], None], undo: ExitStack
) -> None:
    case = made(MANY + 1)

    def run() -> None:
        case.module(rows()).sum().backward()

    first = of_autograd(run, case.module)
    detach(case, undo)
    run()
    change(case.module)
    run()
    undo.close()
    assert case.bucketing.detached == []
    assert case.is_taken(*first, *of_autograd(run, case.module))


@pytest.mark.parametrize("first", [0, 1])
def test_a_call_with_some_of_the_weights_is_seen_by_autograd(first: int, undo: ExitStack) -> None:
    """So that what it adds and what the other call adds wait for each other in the bucketing."""
    case = made(MANY + 2)
    module, (one, two, three, *others) = case.module, case.module.weights
    detach(case, undo)
    loss = module(rows()).sum()
    module.order = [[one, three, two, *others], [two, three, *others]][first]
    loss = loss + module(rows()).sum()
    loss.backward()
    assert len(case.bucketing.taken) == 1 and len(case.bucketing.detached) == MANY + 2
    assert [weight.grad is None for weight in module.weights[:2]] == [bool(first), False]


def test_weights_that_are_attached_for_a_while_are_detached_anew(undo: ExitStack) -> None:
    case = made(MANY)
    detach(case, undo)
    case.module(rows()).sum().backward()
    case.module.weights[1].requires_grad_(False)
    case.module(rows()).sum().backward()
    assert len(case.bucketing.taken) == 1 and case.bucketing.detached == []
    case.module.weights[1].requires_grad_(True)
    case.module(rows()).sum().backward()
    assert len(case.bucketing.taken) == 2 and len(case.bucketing.detached) == MANY


def twice(module: Scaled) -> None:
    (module(rows()).sum() + module(rows(2)).square().sum()).backward()


def half_without(module: Scaled) -> None:
    """One weight has no gradient of the last call, one of the first call, and one of neither."""
    first, last = module(rows()), module(rows(2)).square()
    Scaled.without = (1, 2)
    first.register_hook(lambda _: setattr(Scaled, "without", (2, 3)))
    (first.sum() + last.sum()).backward()
    Scaled.without = ()


def recomputed_between(module: Scaled) -> None:
    """A call that is recomputed, and so in a pass of its own, between two of the outer one."""
    inner: torch.Tensor = checkpoint(module, module(rows()).tanh(), use_reentrant=True)
    module(inner.tanh()).sum().backward()


def kept(module: Scaled) -> None:
    loss = module(rows()).sum() + module(rows(2)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def recomputed_without_a_pass(module: Scaled) -> None:
    inner: torch.Tensor = checkpoint(module, rows(), use_reentrant=False)
    module(inner).sum().backward()


@pytest.mark.parametrize(
    "run", [twice, half_without, recomputed_between, recomputed_without_a_pass, kept]
)
def test_each_pass_hands_over_what_autograd_would(
    run: Callable[[Scaled], None], undo: ExitStack
) -> None:
    case = made()
    expected = of_autograd(lambda: run(case.module), case.module)
    detach(case, undo)
    run(case.module)
    assert case.is_taken(*expected) and case.before == {}


def test_another_operation_that_is_recomputed_meanwhile_is_a_pass_of_its_own(
    undo: ExitStack,
) -> None:
    outer, inner = made(), made()
    module = nn.Sequential(outer.module, inner.module)

    def run() -> None:
        x: torch.Tensor = checkpoint(inner.module, outer.module(rows()).tanh(), use_reentrant=True)
        outer.module(x.tanh()).sum().backward()

    of_outer = of_autograd(run, outer.module)
    for weight in module.parameters():
        weight.grad = None
    of_inner = of_autograd(run, inner.module)
    for weight in module.parameters():
        weight.grad = None
    detached = DetachedWeights(module, outer.bucketing)  # type: ignore[arg-type]
    undo.callback(detach_in(sys.modules[__name__], "_Scaled", detached))
    run()
    # The inner pass ends first, though the outer one has come to a call of its own before.
    assert outer.is_taken(*of_inner, *of_outer)


def test_nothing_is_to_come_outside_a_pass(undo: ExitStack) -> None:
    case = made()
    detach(case, undo)
    loss = case.module(rows()).sum()
    assert not case.bucketing.to_come()
    seen: list[bool] = []
    loss.register_hook(lambda _: seen.append(case.bucketing.to_come()))
    loss.backward(retain_graph=True)
    assert not case.bucketing.to_come()
    loss.backward()
    assert seen == [True, True]


def test_what_a_failed_pass_leaves_is_gone_at_the_next_forward_pass(undo: ExitStack) -> None:
    case = made()
    detach(case, undo)

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("refused")

    middle = case.module(rows()).tanh()
    middle.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        case.module(middle).sum().backward()
    assert len(case.before) == 1
    case.module(rows())
    assert case.before == {} and case.bucketing.taken == []
