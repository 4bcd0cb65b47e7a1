"""Weights of graphs that autograd does not see; gradients lie in memory of the tape until then.

The tape overwrites borrowed memory as its next replay begins, so it shows if a gradient was kept
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.driver.graphed import GraphedModule, StaleReplayError
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_recording import storage_keys
from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.gradients.bucketing import GradientBucketing
from megatron_cg.fastpath.gradients.detached_in_graphs import detach_in_graphs
from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights
from tests.unit.fastpath.bucketing_doubles import Bucketing, hook_weights
from tests.unit.fastpath.test_bucketing import SIZE, Megatron

MICROBATCHES = 3
Gradients = Sequence[torch.Tensor | None]
Run = Callable[["Case"], None]


class Layer(nn.Module):
    """Each weight in turn, once, so that no two have the same gradient."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        with torch.no_grad():
            for weight in weights:
                weight.copy_(torch.randn(SIZE))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            rows = (rows * weight).tanh() * 2 + rows
        return rows


class Case:
    """A layer with a graph for each microbatch, and another that replays in between.

    ``call`` is the layer's microbatch: its graph, or where autograd's own numbers are asked for,
    the layer.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        torch.manual_seed(0)
        self.layer, self.other = Layer(weights), Layer([nn.Parameter(torch.zeros(SIZE))])
        backend, both = TapeBackend(), (self.layer, self.other)
        samples = [(torch.ones(SIZE, requires_grad=True),) for _ in range(2 * MICROBATCHES)]
        graphs: tuple[GraphedModule, ...] = backend.capture(
            both,
            samples,
            capture_time_hooks=[{}, {}],
            _order=[1] * MICROBATCHES + [-1] * MICROBATCHES,
            _num_layers_per_chunk=[2],
        )
        self.graphs, self.between = graphs[::2], graphs[1]
        self.replays = [backend.replay_function(graph) for graph in self.graphs]
        self.weights = list(weights)
        self.eagerly: Sequence[int] = ()
        """Microbatches that the guard finds another mismatch in."""

    def install(self, bucketing: Any) -> Callable[[], None]:
        graphed = set(self.layer.modules())
        detached = DetachedWeights(nn.Sequential(self.layer, self.other), bucketing, graphed)
        return detach_in_graphs(detached, self.replays, lambda: None)

    def call(self, number: int = 0) -> torch.Tensor:
        rows = torch.linspace(-1.0, 1.0 + number, SIZE).requires_grad_()
        made: torch.Tensor = (self.layer if number in self.eagerly else self.graphs[number])(rows)
        return made

    def replay_another(self, _gradient: Any = None) -> None:
        with torch.no_grad():
            self.between(torch.ones(SIZE))

    def penalty(self) -> torch.Tensor:
        """Of every second weight; another graph is replayed before its gradients come."""
        found = torch.stack([weight.square().sum() for weight in self.weights[::2]]).sum()
        found.register_hook(self.replay_another)
        return found

    def of_autograd(self, run: Run) -> list[torch.Tensor | None]:
        """The sums of all gradients, as autograd makes them without any graph."""
        eagerly, self.eagerly = self.eagerly, range(MICROBATCHES)
        hooks: list[Any] = [weight._post_accumulate_grad_hooks for weight in self.weights]
        own = [dict(one) for one in hooks]
        for one in hooks:
            one.clear()
        run(self)
        found = [weight.grad for weight in self.weights]
        for weight, one, before in zip(self.weights, hooks, own, strict=True):
            weight.grad = None
            one.update(before)
        self.eagerly = eagerly
        return found

    def lies_in_a_graph(self, gradient: torch.Tensor) -> bool:
        key = gradient.untyped_storage()._cdata
        return any(key in storage_keys(graph._recorded.grad_inputs) for graph in self.graphs)


def equal(found: Gradients, expected: Gradients) -> bool:
    """Whether all are there, and have the same values."""
    return all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


class Kept:
    """A case whose gradients a fake of the bucketing keeps as they are given to it."""

    def __init__(self, weights: int = 3) -> None:
        self.case = Case([nn.Parameter(torch.zeros(SIZE)) for _ in range(weights)])
        self.bucketing = Bucketing()
        hook_weights(self.case.weights)  # there is none during capture
        self.undo = self.case.install(self.bucketing)

    def took(self, expected: Gradients) -> bool:
        """Whether that is what was handed over last, and autograd was given nothing."""
        gradients, _ = self.bucketing.taken[-1]
        return equal(gradients, expected) and self.got_nothing()

    def got_nothing(self) -> bool:
        return all(weight.grad is None for weight in self.case.weights)

    def lie_in_a_graph(self) -> list[bool]:
        gradients, _ = self.bucketing.taken[-1]
        return [self.case.lies_in_a_graph(gradient) for gradient in gradients]


class Handed:
    """A case whose gradients the real bucketing takes, for buckets of these many parameters."""

    def __init__(self, *sizes: int, graphed: int, sharded: bool = True) -> None:
        self.megatron = Megatron(*sizes, sharded=sharded)
        self.bucketing = GradientBucketing(self.megatron, self.megatron.take)
        parameters = self.megatron.parameters
        self.case, self.rest = Case(parameters[:graphed]), parameters[graphed:]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda one: self.bucketing([one]))
        self.case.install(self.bucketing)

    def rest_comes(self) -> list[torch.Tensor]:
        """What is eager in the unit has its gradients after the graph, and another replay."""
        self.case.replay_another()
        found = [torch.full((SIZE,), 3.0 + place) for place, _ in enumerate(self.rest)]
        for parameter, gradient in zip(self.rest, found, strict=True):
            parameter.grad = gradient.clone()
            self.bucketing([parameter])
        return found


def first(case: Case) -> None:
    case.call().square().sum().backward()


def second(case: Case) -> None:
    case.call(1).square().sum().backward()


def two_calls(case: Case) -> None:
    (case.call(0).square().sum() + case.call(1).sum()).backward()


def three_calls(case: Case) -> None:
    # Of a graph that is added twice all bits are those of autograd, in whatever order.
    (case.call(0).sum() + case.call(1).sum() * 0.0 + case.call(2).square().sum()).backward()


def penalty_first(case: Case) -> None:
    """Autograd comes to what was made last first, so the graph's gradients wait."""
    penalty = case.penalty()
    (case.call().square().sum() + penalty).backward()


def penalty_last(case: Case) -> None:
    output = case.call().square().sum()
    (output + case.penalty()).backward()


def test_gradients_are_handed_over_as_they_lie_there() -> None:
    kept = Kept()
    expected = kept.case.of_autograd(first)
    first(kept.case)
    assert kept.took(expected) and kept.lie_in_a_graph() == [True] * 3
    assert kept.bucketing.borrowed == [True] and kept.bucketing.taken[0][1] == [False] * 3
    # They hold until the next replay of any graph.
    kept.case.replay_another()
    assert not kept.took(expected)


def test_the_graphs_of_two_microbatches_share_their_weights() -> None:
    kept = Kept()
    for number, run in enumerate((first, second, first)):
        expected = kept.case.of_autograd(run)
        run(kept.case)
        assert kept.took(expected) and len(kept.bucketing.taken) == number + 1
    assert [id(w) for w in kept.bucketing.detached] == [id(w) for w in kept.case.weights]


@pytest.mark.parametrize("run", [two_calls, three_calls])
def test_calls_of_one_pass_are_summed_up_outside_of_the_graphs(run: Run) -> None:
    kept = Kept()
    expected = kept.case.of_autograd(run)
    for number in (1, 2):
        run(kept.case)
        assert kept.took(expected) and len(kept.bucketing.taken) == number
        assert kept.lie_in_a_graph() == [False] * 3


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_pass_that_can_be_differentiated_hands_over_the_same() -> None:
    kept = Kept()
    expected = kept.case.of_autograd(first)
    kept.case.call().square().sum().backward(create_graph=True)
    assert kept.took(expected)


def test_few_weights_are_detached_too_and_a_frozen_one_is_left_out() -> None:
    kept = Kept(2)
    kept.case.weights[0].requires_grad_(False)
    (nothing, expected) = kept.case.of_autograd(first)
    first(kept.case)
    assert nothing is None and kept.took([expected]) and len(kept.bucketing.taken[0][0]) == 1


def test_without_grad_the_graph_is_replayed_as_it_is() -> None:
    kept = Kept()
    with torch.no_grad():
        output = kept.case.call()
        assert torch.equal(output, kept.case.layer(torch.linspace(-1.0, 1.0, SIZE)))
    assert not output.requires_grad and kept.bucketing.detached == []
    expected = kept.case.of_autograd(first)
    first(kept.case)
    assert kept.took(expected)


def is_visible(kept: Kept, expected: Gradients) -> bool:
    """Whether autograd has the gradients, and as copies: it borrows nothing."""
    found = [weight.grad for weight in kept.case.weights]
    kept.case.replay_another()
    for weight in kept.case.weights:
        weight.grad = None
    return equal(found, expected)


def test_after_the_undo_autograd_has_copies_of_all_gradients() -> None:
    kept = Kept()
    expected = kept.case.of_autograd(first)
    first(kept.case)
    kept.undo()
    first(kept.case)
    assert is_visible(kept, expected) and len(kept.bucketing.taken) == 1
    assert kept.bucketing.detached == []
    assert all(isinstance(graph._function, type) for graph in kept.case.graphs)


def test_a_weight_with_a_hook_of_its_own_is_seen_and_its_gradient_a_copy() -> None:
    kept = Kept()
    expected = kept.case.of_autograd(first)
    first(kept.case)
    seen: list[torch.Tensor] = []
    hook = kept.case.weights[1].register_hook(lambda gradient: seen.append(gradient.clone()))
    first(kept.case)
    assert is_visible(kept, expected) and len(kept.bucketing.taken) == 1
    (of_hook,) = seen
    assert expected[1] is not None and torch.equal(of_hook, expected[1])
    hook.remove()
    first(kept.case)
    assert kept.took(expected)


def test_nothing_is_borrowed_after_a_backward_pass_that_failed() -> None:
    kept = Kept()
    loss = kept.case.call().sum()
    kept.case.call()
    with pytest.raises(StaleReplayError):
        loss.backward()
    kept.undo()
    expected = kept.case.of_autograd(first)
    first(kept.case)
    assert is_visible(kept, expected)


def test_a_pass_that_names_its_inputs_is_refused() -> None:
    kept = Kept()
    rows = torch.ones(SIZE, requires_grad=True)
    with pytest.raises(FastPathError, match="reached a graph or"):
        torch.autograd.grad(kept.case.graphs[0](rows).sum(), rows)


def test_a_hook_between_the_passes_is_refused() -> None:
    kept = Kept()
    loss = kept.case.call().sum()
    kept.case.weights[1].register_hook(lambda _: None)
    with pytest.raises(FastPathError, match="A weight of a graph or"):
        loss.backward()


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "summed"])
@pytest.mark.parametrize("rest", [0, 2])
def test_borrowed_gradients_go_into_their_bucket_by_one_copy(rest: int, sharded: bool) -> None:
    handed = Handed(3 + rest, graphed=3, sharded=sharded)
    expected = handed.case.of_autograd(first)
    for number in (1, 2):
        handed.megatron.begin()
        before = handed.bucketing.copies
        first(handed.case)
        assert handed.bucketing.copies == before + 1
        assert handed.megatron.buffers[0].reduced == (number - 1 if rest else number)
        more = handed.rest_comes()
        assert handed.bucketing.copies == before + (2 if rest else 1)
        times = 1 if sharded else number
        assert handed.megatron.has([g * times for g in [*expected, *more] if g is not None])
        assert all(parameter.grad is None for parameter in handed.megatron.parameters)


def test_borrowed_gradients_of_several_buckets_go_into_them_by_one_copy_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed = Handed(2, 4, 2, graphed=8)
    expected = handed.case.of_autograd(first)
    for number in (1, 2):
        handed.megatron.begin()
        before = handed.bucketing.copies
        with monkeypatch.context() as nothing_is_cloned:
            nothing_is_cloned.setattr(torch.Tensor, "clone", None, raising=False)
            first(handed.case)
        assert handed.bucketing.copies == before + 3
        assert [buffer.reduced for buffer in handed.megatron.buffers] == [number] * 3
        assert handed.megatron.has(expected)


@pytest.mark.parametrize("rest", [0, 2])
@pytest.mark.parametrize("eagerly", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("run", [first, two_calls, penalty_first, penalty_last])
def test_what_lies_in_the_bucket_is_what_autograd_has(
    run: Run, eagerly: tuple[int, ...], rest: int
) -> None:
    """With other uses, and microbatches that run eagerly, in whatever order they come."""
    handed = Handed(3 + rest, graphed=3)
    handed.case.eagerly = eagerly
    expected = handed.case.of_autograd(run)
    for _ in range(2):
        handed.megatron.begin()
        run(handed.case)
        more = handed.rest_comes()
        assert handed.megatron.has([*expected, *more])
        handed.megatron.begin()
        handed.bucketing.refuse_what_is_left()


@pytest.mark.parametrize("run", [first, two_calls, penalty_first, penalty_last])
def test_gradients_that_wait_for_another_bucket_are_copies(run: Run) -> None:
    handed = Handed(2, 4, graphed=4)
    expected = handed.case.of_autograd(run)
    for number in range(2):
        handed.megatron.begin()
        run(handed.case)
        assert handed.megatron.buffers[1].reduced == number
        more = handed.rest_comes()
        assert handed.megatron.has([*expected, *more])


def nan_is_reported(megatron: Megatron) -> None:
    megatron.report_nan_in_param_grad = True


def one_is_written_already(megatron: Megatron) -> None:
    megatron.parameters[0].grad = torch.zeros(SIZE)


@pytest.mark.parametrize("change", [nan_is_reported, one_is_written_already])
def test_what_is_more_than_a_copy_is_done_with_copies(change: Callable[[Megatron], None]) -> None:
    handed = Handed(4, graphed=3)
    expected = handed.case.of_autograd(first)
    change(handed.megatron)
    first(handed.case)
    more = handed.rest_comes()
    assert handed.megatron.has([*expected, *more])


def test_buckets_are_reduced_in_the_order_of_an_eager_pass() -> None:
    """A rank that runs the layer eagerly, alone, reduces them together with the others."""
    handed = Handed(2, 2, graphed=4)
    orders = []
    for eagerly in ((), (0,)):
        handed.case.eagerly = eagerly
        handed.megatron.begin()
        first(handed.case)
        orders.append([place // 2 for place in handed.megatron.told])
        handed.megatron.told = []
    assert orders == [[1, 0], [1, 0]]
