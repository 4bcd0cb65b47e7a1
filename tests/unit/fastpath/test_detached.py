"""Weights that autograd does not see: those of graphs.

Random programs use them in many ways in each pass, before the real gradient bucketing. Their
numbers are whole, so that no sum depends on its order. The tape overwrites borrowed memory as its
next replay begins, so it shows if a gradient was kept there.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.backends.driver import GraphResetError
from megatron_cg.capture.guarded_capture import forget_accumulators
from megatron_cg.errors import FastPathError, UpstreamChangedError
from megatron_cg.fastpath.bucketing import GradientBucketing
from megatron_cg.fastpath.detached_weights import DetachedWeights, detach_in_graphs
from megatron_cg.tape.tape_backend import TapeBackend
from tests.unit.counted import calls_of
from tests.unit.fastpath.test_bucketing import SIZE, Megatron

PARTS, WIDTH = 6, 4


class _Grouped(torch.autograd.Function):
    """Rows times the sum of all weights; each has a gradient of its own."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        context.save_for_backward(rows, *weights)
        return rows * sum(weights)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        rows, *weights = context.saved_tensors
        into = (gradient * rows).reshape(-1, rows.shape[-1]).sum(0)
        found = [(into * (1 + n / Grouped.spread)).to(Grouped.dtype) for n, _ in enumerate(weights)]
        return gradient * sum(weights), *found


class Grouped(nn.Module):
    """A unit whose weights get gradients that are pieces of one computation."""

    dtype, spread = torch.float32, 7
    """Of the weights' gradients: their dtype, and how they differ."""

    def __init__(self, weights: Sequence[nn.Parameter] | None = None) -> None:
        super().__init__()
        own = weights or [nn.Parameter(torch.randn(WIDTH) / 4) for _ in range(PARTS)]
        for number, weight in enumerate(own):
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., Any] = _Grouped.apply
        output: torch.Tensor = apply(rows, *self._parameters.values())
        return output


GRAPHS = 6


class Case:
    """Weights of a graphed unit, and other parameters around it, whose gradients are bucketed.

    Args:
        graphs: whether the unit has a graph for each microbatch.
        sizes: how many parameters each bucket has.
        weights: how many of them are the unit's.
    """

    def __init__(
        self, *sizes: int, weights: int, graphs: bool = True, sharded: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.megatron = Megatron(*sizes, sharded=sharded)
        parameters = self.megatron.parameters
        self.weights, self.rest = parameters[:weights], parameters[weights:]
        with torch.no_grad():
            for weight in self.weights:
                weight.copy_(torch.randint(-2, 3, weight.shape))
        self.layer = Grouped(self.weights)
        self.bucketing = GradientBucketing(self.megatron, self.megatron.take)
        self.graphs: list[Any] = []
        self.called = 0
        """The graphs that were called in this pass."""
        if graphs:
            self._capture()

    def _capture(self) -> None:
        backend: Any = TapeBackend()
        other = Grouped([nn.Parameter(torch.ones(SIZE))])
        samples: Any = [(torch.ones(2, SIZE, requires_grad=True),) for _ in range(2 * GRAPHS)]
        captured = backend.capture(CaptureRequest((self.layer, other) * GRAPHS, samples))
        self.graphs, self.between = list(captured[::2]), captured[1]
        self.replays = [backend.replay_function(graph) for graph in self.graphs]

    def install(self) -> Callable[[], None]:
        """From now on gradients are bucketed, and the unit's weights are detached."""
        for parameter in self.megatron.parameters:
            parameter.register_post_accumulate_grad_hook(lambda one: self.bucketing([one]))
        self.detached = DetachedWeights(self.bucketing)
        return detach_in_graphs(self.detached, self.replays, lambda: None)

    def call(self, rows: torch.Tensor, *, eagerly: bool = False) -> torch.Tensor:
        operation = self.layer
        if self.called < len(self.graphs) and not eagerly:
            operation, self.called = self.graphs[self.called], self.called + 1
        output: torch.Tensor = operation(rows)
        return output

    def replay_another(self, _gradient: Any = None) -> None:
        """Another graph of the pool writes to the memory that gradients are borrowed from."""
        if self.graphs:
            with torch.no_grad():
                self.between(torch.ones(2, SIZE))

    def end_pass(self) -> list[torch.Tensor]:
        """What follows in a backward pass: gradients of the rest, and Megatron's root hook."""
        self.replay_another()
        found = [torch.full((SIZE,), 3.0 + place) for place, _ in enumerate(self.rest)]
        for parameter, gradient in zip(self.rest, found, strict=True):
            parameter.grad = gradient.clone()
            self.bucketing([parameter])
        self.bucketing.unit_is_done(self.megatron.unit)
        for parameter in list(self.megatron._params_require_handle_grad):
            self.megatron.take([parameter])
        return found


def given(number: int = 0) -> torch.Tensor:
    return (torch.arange(2.0 * SIZE).view(2, SIZE) - number).requires_grad_()


class Program:
    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.sharded = draw.random() < 0.7
        self.sizes, self.weights = draw.choice([((4,), 4), ((7,), 4), ((2, 5), 6), ((3, 3), 6)])
        self.in_flight = draw.random() < 0.3
        """Whether all forward passes come before all backward passes."""
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        kinds = [self.call, self.call, self.chain, self.penalty, self.eager]
        self.passes = [
            [(draw.choice(kinds), draw.choice([-2, -1, 1, 2])) for _ in range(draw.randint(1, 4))]
            for _ in range(3)
        ]

    def call(self, case: Case) -> torch.Tensor:
        return case.call(given(1))

    def chain(self, case: Case) -> torch.Tensor:
        return case.call(case.call(given()))

    def eager(self, case: Case) -> torch.Tensor:
        return case.call(given(2), eagerly=True)

    def penalty(self, case: Case) -> torch.Tensor:
        """Of every second weight; another graph is replayed before its gradients come."""
        found = torch.stack([weight.square().sum() for weight in case.weights[::2]])
        found.register_hook(case.replay_another)
        return found

    def forward(self, case: Case, number: int) -> torch.Tensor:
        case.called *= self.in_flight
        return torch.stack([term(case).sum() * scale for term, scale in self.passes[number]]).sum()

    def run(self, case: Case, end: Callable[[], list[Any]]) -> list[list[Any]]:
        numbers, found = range(len(self.passes)), []
        ahead = [self.forward(case, number) for number in numbers] if self.in_flight else []
        for number in numbers:
            loss = ahead[number] if ahead else self.forward(case, number)
            case.megatron.begin()
            loss.backward()
            found.append(end())
        return found


@pytest.mark.parametrize("seed", range(80))
def test_what_lies_in_buckets_is_what_autograd_has(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(seed)
    monkeypatch.setattr(Grouped, "dtype", program.dtype)
    monkeypatch.setattr(Grouped, "spread", 1)

    def made(graphs: bool) -> Case:
        return Case(*program.sizes, weights=program.weights, graphs=graphs, sharded=program.sharded)

    plain = made(False)

    def gradients() -> list[Any]:
        found = [weight.grad for weight in plain.weights]
        for weight in plain.weights:
            weight.grad = None
        return found

    expected = program.run(plain, gradients)
    case = made(True)
    undo, sums = case.install(), None

    def compare() -> list[Any]:
        nonlocal sums
        own = [*expected.pop(0), *case.end_pass()]
        own = [torch.zeros(SIZE) if one is None else one for one in own]
        sums = own if program.sharded or sums is None else list(map(torch.add, sums, own))
        assert case.megatron.has(sums)
        assert all(one._before == {} for one in case.detached._of.values())
        assert all(parameter.grad is None for parameter in case.megatron.parameters)
        return []

    program.run(case, compare)
    case.megatron.begin()
    case.bucketing.refuse_what_is_left()
    undo()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights' gradients are taken at once, each time."""
    found, own = list[int](), GradientBucketing.take_detached

    def take(bucketing: Any, together: Any, *rest: Any, **how: Any) -> None:
        found.append(len(together.weights))
        own(bucketing, together, *rest, **how)

    monkeypatch.setattr(GradientBucketing, "take_detached", take)
    return found


@pytest.fixture
def case() -> Iterator[Case]:
    """The weights of a unit, which fill a bucket and are detached."""
    made = Case(PARTS, weights=PARTS)
    undo = made.install()
    yield made
    undo()


def one_pass(case: Case) -> None:
    case.megatron.begin()
    case.called = 0
    case.call(given()).square().sum().backward()
    case.end_pass()


HOOKED: list[Callable[[Case], object]] = [
    lambda case: case.weights[1].register_hook(lambda gradient: gradient * 2),
    lambda case: case.weights[1].register_post_accumulate_grad_hook(lambda _: None),
]


@pytest.mark.parametrize("change", HOOKED)
def test_weights_that_are_more_than_weights_are_left_to_autograd(
    change: Callable[[Case], object], case: Case, taken: list[int]
) -> None:
    one_pass(case)
    assert taken == [PARTS]
    change(case)
    one_pass(case)
    assert taken == [PARTS]


def test_few_weights_of_a_graph_are_detached_and_unknown_ones_are_not(taken: list[int]) -> None:
    undo = (few_weights := Case(2, weights=2)).install()
    with torch.no_grad():
        assert not few_weights.call(given()).requires_grad and not few_weights.detached._of
    one_pass(few_weights)
    undo()
    unknown = Case(PARTS, weights=PARTS)
    unknown.bucketing._of_parameter.clear()
    undo = unknown.install()
    unknown.call(given()).sum().backward()
    undo()
    assert taken == [2]


@pytest.mark.parametrize("change", HOOKED)
def test_weights_that_change_between_the_passes_end_the_run(
    change: Callable[[Case], object], case: Case, taken: list[int]
) -> None:
    loss = case.call(given()).sum()
    change(case)
    with pytest.raises(FastPathError, match="after the forward pass"):
        loss.backward()
    assert taken == []


def test_a_torch_without_what_it_relies_on_is_told_before_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    with pytest.raises(UpstreamChangedError, match="_will_engine_execute_node"):
        Case(PARTS, weights=PARTS).install()


def test_a_pass_that_names_its_inputs_is_refused(case: Case, taken: list[int]) -> None:
    rows = given()
    for named in ([rows], [rows, case.weights[0]]):
        with pytest.raises(FastPathError, match="names its inputs"):
            case.call(rows).sum().backward(inputs=named)
        with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
            torch.autograd.grad(case.call(rows).sum(), named, allow_unused=True)
    assert taken == []


def test_a_pass_that_names_weights_alone_is_refused_if_it_comes_to_their_graph() -> None:
    case = Case(PARTS, 2, weights=PARTS)
    undo, (first, *_), (other, _) = case.install(), case.weights, case.rest
    loss, edge = case.call(given()).sum() * other.sum(), get_gradient_edge(first)
    for named in ([first], [other, first], edge):
        with pytest.raises(FastPathError, match="names its inputs"):
            loss.backward(inputs=named)
        with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
            torch.autograd.grad(loss * 2, named, allow_unused=True)
    penalty = first.square().sum()  # Its pass does not come to the graph.
    assert torch.autograd.grad(penalty, [first], retain_graph=True)[0].equal(2 * first)
    (given_to_other,) = torch.autograd.grad(loss, [other], retain_graph=True)
    assert given_to_other.unique().numel() == 1
    case.megatron.begin()
    loss.backward()
    undo()
    assert torch.autograd.grad(penalty + case.call(given()).sum(), first)[0] is not None


def test_a_graph_returns_copies_again_after_a_pass_that_failed_and_the_undo(
    taken: list[int],
) -> None:
    case = Case(PARTS, weights=PARTS)
    undo = case.install()
    loss, recorded = case.call(given()).sum(), case.graphs[0]._recorded
    whole, recorded.backward = recorded.backward, None
    with pytest.raises(GraphResetError):
        loss.backward()
    recorded.backward = whole
    undo()
    assert all(isinstance(graph._function, type) for graph in case.graphs)
    case.called = 0
    loss = case.call(given()).sum()
    gradients = torch.autograd.grad(loss, case.weights)
    before = [gradient.clone() for gradient in gradients]
    case.replay_another()
    assert all(map(torch.equal, before, gradients)) and not taken


def test_gradients_of_a_graph_go_into_each_bucket_by_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of an eager pass: a rank may run the layer eagerly, alone."""
    case = Case(2, 4, 2, weights=8)
    undo = case.install()
    with monkeypatch.context() as nothing_is_cloned, calls_of(case.bucketing, "_copy") as copies:
        nothing_is_cloned.setattr(torch.Tensor, "clone", None, raising=False)
        one_pass(case)
    assert len(copies) == 3
    # One by one, as where a gradient waits in a weight's ``grad``, they keep that order.
    case.weights[0].grad = torch.zeros(SIZE)
    one_pass(case)
    assert case.megatron.told == [*(7, 5, 1), *(6, 2, 0)]
    undo()


def test_weights_that_got_other_accumulators_end_the_run(case: Case) -> None:
    one_pass(case)
    forget_accumulators([case.layer])
    case.megatron.begin()
    penalty = case.weights[1].square().sum()
    with pytest.raises(FastPathError, match="another AccumulateGrad node"):
        (case.call(given()).sum() + penalty).backward()
