"""Weights that autograd does not see: those of grouped GEMMs and of graphs.

First against autograd, with a fake of gradient bucketing. Then graphs on the tape with the real
bucketing: the tape overwrites borrowed memory as its next replay begins, so it shows if a gradient
was kept there. Then the real Megatron-FSDP, in passes that are usual and in others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.backends.driver.graphed import GraphResetError
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_recording import storage_keys
from megatron_cg.capture.accumulators import forget_accumulators
from megatron_cg.errors import FastPathError, UpstreamChangedError
from megatron_cg.fastpath.gradients.bucketing import GradientBucketing
from megatron_cg.fastpath.gradients.detached_in_graphs import detach_in_graphs
from megatron_cg.fastpath.gradients.detached_weights import (
    MANY,
    DetachedWeights,
    detach_in,
    install_detached,
)
from megatron_cg.fastpath.gradients.views import in_one_piece
from megatron_cg.upstream.backward_pass import CURRENT_PASS
from tests.unit.fastpath.test_bucketing import SIZE, Megatron
from tests.unit.ranks import on_ranks

PARTS, WIDTH, STEPS = 6, 4, 3
PLACE, NAME = sys.modules[__name__], "_Grouped"
Gradients = Sequence[torch.Tensor | None]


class _Grouped(torch.autograd.Function):
    """Rows times the sum of all weights; each has a gradient of its own."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor | None) -> Any:
        context.save_for_backward(rows, *weights)
        return rows * sum(weight for weight in weights if weight is not None)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        rows, *weights = context.saved_tensors
        into = (gradient * rows).reshape(-1, WIDTH).sum(0) * Grouped.factor
        found = [(into * (1 + n / 7)).to(Grouped.gradients) for n, _ in enumerate(weights)]
        if Grouped.neighbours:
            found = list(torch.stack(found))
        left_out = [n in Grouped.without or weight is None for n, weight in enumerate(weights)]
        each = [None if left else one for one, left in zip(found, left_out, strict=True)]
        return gradient * sum(weight for weight in weights if weight is not None), *each


class Grouped(nn.Module):
    """Some experts, as a grouped GEMM has them; ``order`` may hold more than its weights."""

    gradients, factor = torch.float32, 1.0
    """The dtype of the weights' gradients, and what they are multiplied by."""
    neighbours = False
    """Whether they are pieces of one tensor."""
    without: tuple[int, ...] = ()
    """Places of weights that get none."""

    def __init__(self, weights: int = PARTS) -> None:
        super().__init__()
        for number in range(weights):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(WIDTH) / 4))
        self.order: list[Any] | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., Any] = _Grouped.apply
        output: torch.Tensor = apply(rows, *(self.order or self._parameters.values()))
        return output


class Bucketing:
    """Keeps the gradients that it is given, by weight; it knows ``own`` parameters, or all."""

    def __init__(self, own: nn.Module | None = None) -> None:
        self._own = None if own is None else set(own.parameters())
        self.taken: list[dict[Any, torch.Tensor]] = []
        self.used: list[list[bool]] = []
        self.borrowed: list[bool] = []
        self.detached: list[Any] = []
        self.to_come: Callable[[], bool] = bool

    def knows(self, parameter: object) -> bool:
        known = isinstance(parameter, nn.Parameter)
        return known and (self._own is None or parameter in self._own)

    def detach(self, weights: list[Any], to_come: Callable[[], bool]) -> list[Any]:
        self.to_come = to_come
        self.detached += weights
        return weights

    def attach(self, weights: list[Any]) -> None:
        self.detached = [one for one in self.detached if all(one is not w for w in weights)]

    def take_detached(
        self, weights: Any, gradients: Gradients, used: list[bool], *, borrowed: bool = False
    ) -> None:
        pairs = zip(weights, gradients, strict=True)
        self.taken.append({weight: one for weight, one in pairs if one is not None})
        self.used.append(used)
        self.borrowed.append(borrowed)


def hook_weights(weights: Any) -> None:
    """Give each weight a hook, instead of Megatron-FSDP's own."""
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)


def made(weights: int = PARTS) -> Any:
    torch.manual_seed(0)
    module = Grouped(weights)
    hook_weights(module.parameters())
    return module


def rows(scale: float = 1.0) -> torch.Tensor:
    return torch.linspace(-1.0, scale, 2 * WIDTH).view(2, WIDTH).requires_grad_()


def detached_of(module: nn.Module, bucketing: Any, graphed: Any = ()) -> DetachedWeights:
    return DetachedWeights(nn.Sequential(module), bucketing, graphed)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    own = _Grouped
    with ExitStack() as stack:
        yield stack
    assert _Grouped is own


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may change what the function computes."""
    for name in ("gradients", "factor", "neighbours", "without"):
        monkeypatch.setattr(Grouped, name, getattr(Grouped, name))


def once(module: Any) -> None:
    module(rows()).square().sum().backward()


def in_flight(module: Any) -> None:
    """Two microbatches at once, as in a pipeline."""
    first, second = module(rows()).sum(), module(rows(2)).square().sum()
    first.backward()
    second.backward()


def twice(module: Any) -> None:
    (module(rows()).sum() + module(rows(2)).square().sum()).backward()


def half_without(module: Any) -> None:
    """One weight has no gradient of the last call, one of the first call, and one of neither."""
    first, last = module(rows()), module(rows(2)).square()
    Grouped.without = (1, 2)
    first.register_hook(lambda _: setattr(Grouped, "without", (2, 3)))
    (first.sum() + last.sum()).backward()


def of_another_type(module: Any) -> None:
    """Gradients are cast before they are added up."""
    Grouped.gradients = torch.bfloat16
    twice(module)


def recomputed_between(module: Any) -> None:
    """A call that is recomputed, and so in a pass of its own, between two of the outer one."""
    inner: torch.Tensor = checkpoint(module, module(rows()).tanh(), use_reentrant=True)
    module(inner.tanh()).sum().backward()


def recomputed_without_a_pass(module: Any) -> None:
    module(checkpoint(module, rows(), use_reentrant=False)).sum().backward()


def kept(module: Any) -> None:
    loss = module(rows()).sum() + module(rows(2)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def failed_between(module: Any) -> None:
    """A pass that failed between two calls leaves nothing."""

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("refused")

    with ExitStack() as stack:
        for weight in module.parameters():  # Autograd has given out what came first.
            own = dict(weight._post_accumulate_grad_hooks)
            stack.callback(weight._post_accumulate_grad_hooks.update, own)
            if len(own) > 1:
                weight._post_accumulate_grad_hooks.clear()
        middle = module(rows()).tanh()
        middle.register_hook(refuse)
        with pytest.raises(ValueError, match="refused"):
            module(middle).sum().backward()
        del middle
        for weight in module.parameters():
            weight.grad = None
    once(module)


def with_constants(module: Any) -> None:
    """What no gradient is asked of, before, between and after the weights."""
    one, two, *others = module.parameters()
    module.order = [torch.ones(WIDTH), one, None, two, torch.ones(WIDTH), *others, None]
    once(module)


def with_others_frozen(module: Any) -> None:
    for changes in (((1, False),), ((1, True), (2, False)), ((2, True),)):
        for number, needs in changes:
            module.get_parameter(f"weight{number}").requires_grad_(needs)
        once(module)


def in_other_orders(module: Any) -> None:
    """The same first weight, and others in another order."""
    once(module)
    one, two, three, *others = module.parameters()
    module.order = [one, three, two, *others]
    once(module)


RUNS = (
    *(once, in_flight, twice, half_without, of_another_type, recomputed_between),
    *(recomputed_without_a_pass, kept, with_constants, with_others_frozen, in_other_orders),
    failed_between,
)


def of_autograd(run: Callable[[Any], None]) -> list[dict[int, torch.Tensor]]:
    """What the hooks of all weights find as autograd runs them, one pass after the other."""
    module, found = made(), dict[int, dict[int, torch.Tensor]]()
    for place, weight in enumerate(module.parameters()):

        def note(weight: torch.Tensor, place: int = place) -> None:
            of_pass = found.setdefault(CURRENT_PASS.find()(), {})
            if weight.grad is not None:
                of_pass[place] = weight.grad
                weight.grad = None

        weight.register_post_accumulate_grad_hook(note)
    run(module)
    return list(found.values())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_each_pass_hands_over_what_autograd_would(
    run: Callable[[Any], None], undo: ExitStack
) -> None:
    expected = of_autograd(run)
    Grouped.without, Grouped.gradients = (), torch.float32
    module, bucketing = made(), Bucketing()
    detached = detached_of(module, bucketing)
    undo.callback(detach_in(PLACE, NAME, detached))
    run(module)
    weights = list(module.parameters())
    assert len(bucketing.taken) == len(expected)
    for ours, theirs in zip(bucketing.taken, expected, strict=True):
        assert ours.keys() == {weights[place] for place in theirs}
        for place, gradient in theirs.items():
            assert torch.equal(ours[weights[place]].float(), gradient.float())
    assert all(weight.grad is None for weight in weights)
    assert all(one._before == {} for one in detached._of.values())


def hooked(module: Any) -> None:
    module.weight1.register_hook(lambda gradient: gradient * 2)


def hooked_after(module: Any) -> None:
    module.weight1.register_post_accumulate_grad_hook(lambda _: None)


def computed_later(module: Any) -> None:
    module.weight1.skip_backward_post_hook = True


def nobody_waits(module: Any) -> None:
    module.weight1._post_accumulate_grad_hooks.clear()


def few(module: Any) -> None:
    for number in range(PARTS - MANY + 1):
        module.get_parameter(f"weight{number}").requires_grad_(False)


def one_is_there_twice(module: Any) -> None:
    module._parameters["weight5"] = module._parameters["weight0"]


@pytest.mark.parametrize(
    "change", [hooked, hooked_after, computed_later, nobody_waits, few, one_is_there_twice]
)
def test_weights_that_are_more_than_weights_are_left_to_autograd(
    change: Callable[[Any], None], undo: ExitStack
) -> None:
    module, bucketing = made(), Bucketing()
    undo.callback(detach_in(PLACE, NAME, detached_of(module, bucketing)))
    once(module)
    assert len(bucketing.taken) == 1 and len(bucketing.taken[0]) == PARTS
    change(module)
    once(module)
    assert len(bucketing.taken) == 1
    assert all(weight.grad is not None for weight in module.parameters() if weight.requires_grad)


def test_many_weights_of_known_modules_outside_of_graphs_are_detached(undo: ExitStack) -> None:
    for weights, known, graphed, taken in (
        (MANY, True, False, 1),
        (MANY - 1, True, False, 0),
        (MANY, False, False, 0),
        (MANY, True, True, 0),
    ):
        module = made(weights)
        bucketing = Bucketing(module if known else nn.Linear(1, 1))
        detached = detached_of(module, bucketing, {module} if graphed else set())
        end = detach_in(PLACE, NAME, detached)
        once(module)
        end()
        assert len(bucketing.taken) == taken


@pytest.mark.parametrize("change", [hooked, hooked_after, computed_later])
def test_weights_that_change_between_the_passes_end_the_run(
    change: Callable[[Any], None], undo: ExitStack
) -> None:
    module, bucketing = made(), Bucketing()
    undo.callback(detach_in(PLACE, NAME, detached_of(module, bucketing)))
    loss = module(rows()).sum()
    change(module)
    with pytest.raises(FastPathError, match="after the forward pass"):
        loss.backward()
    assert bucketing.taken == []


def test_a_pass_that_names_its_inputs_is_refused(undo: ExitStack) -> None:
    module, bucketing, given = made(), Bucketing(), rows()
    undo.callback(detach_in(PLACE, NAME, detached_of(module, bucketing)))
    for named in ([given], [given, module.weight0]):
        with pytest.raises(FastPathError, match="names its inputs"):
            module(given).sum().backward(inputs=named)
        with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
            torch.autograd.grad(module(given).sum(), named, allow_unused=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(module(given).sum(), [module.weight0])
    assert bucketing.taken == []


def test_other_uses_and_calls_to_come_are_known(undo: ExitStack) -> None:
    module, bucketing, seen = made(), Bucketing(), list[bool]()
    undo.callback(detach_in(PLACE, NAME, detached_of(module, bucketing)))
    for _ in range(10):
        module(rows())
    to_come: Any = bucketing.to_come
    assert not to_come() and len(to_come.__self__._calls) == 1
    loss = module(rows()).sum() + module.weight2.sum()
    loss.register_hook(lambda _: seen.append(to_come()))
    loss.backward()
    assert seen == [True] and not to_come()
    assert bucketing.used == [[place == 2 for place in range(PARTS)]]


@pytest.mark.parametrize("first", [0, 1])
def test_a_call_with_some_of_the_weights_is_seen_by_autograd(first: int, undo: ExitStack) -> None:
    """So that what it adds and what the other call adds wait for each other in the bucketing."""
    module, bucketing = made(), Bucketing()
    one, two, three, *others = module.parameters()
    undo.callback(detach_in(PLACE, NAME, detached_of(module, bucketing)))
    loss = module(rows()).sum()
    module.order = [[one, three, two, *others], [two, three, *others]][first]
    (loss + module(rows()).sum()).backward()
    assert len(bucketing.taken) == 1 and len(bucketing.detached) == PARTS
    assert [weight.grad is None for weight in (one, two)] == [bool(first), False]


def test_models_share_the_stand_in_and_leave_in_any_order() -> None:
    own, modules = _Grouped, [made(), made()]
    ours = [Bucketing(module) for module in modules]
    # As the second one is between two steps: it holds the optimizer's parameters.
    raw = dict(modules[1]._parameters)
    modules[1]._parameters.update({name: nn.Parameter(torch.zeros(1)) for name in raw})
    undo = [detach_in(PLACE, NAME, detached_of(m, b)) for m, b in zip(modules, ours, strict=True)]
    once(modules[0])
    modules[1]._parameters.update(raw)
    once(modules[1])
    undo[0]()
    for module in modules:
        once(module)
    assert [len(one.taken) for one in ours] == [1, 2]
    assert ours[0].detached == [] and modules[0].weight0.grad is not None
    undo[1]()
    assert _Grouped is own


def test_a_function_whose_weights_are_not_last_is_refused() -> None:
    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: Any, weight: Any) -> Any: ...

    place = SimpleNamespace(Fixed=Fixed)
    with pytest.raises(UpstreamChangedError, match="weights come last"):
        detach_in(place, "Fixed", detached_of(nn.Linear(1, 1), Bucketing()))
    assert place.Fixed is Fixed


MICROBATCHES = 3
Run = Callable[["Graphs"], None]


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


class Graphs:
    """A layer with a graph for each microbatch, and another that replays in between.

    ``call`` is the layer's microbatch: its graph, or for those in ``eagerly`` the layer.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        torch.manual_seed(0)
        self.layer, self.other = Layer(weights), Layer([nn.Parameter(torch.zeros(SIZE))])
        backend: Any = TapeBackend()
        graphs = backend.capture(
            (self.layer, self.other) * MICROBATCHES,
            [(torch.ones(SIZE, requires_grad=True),) for _ in range(2 * MICROBATCHES)],
            capture_time_hooks=[{}] * (2 * MICROBATCHES),
        )
        self.graphs, self.between = graphs[::2], graphs[1]
        self.replays = [backend.replay_function(graph) for graph in self.graphs]
        self.weights, self.eagerly = list(weights), tuple[int, ...]()

    def install(self, bucketing: Any) -> Callable[[], None]:
        graphed = set(self.layer.modules())
        detached = DetachedWeights(nn.Sequential(self.layer, self.other), bucketing, graphed)
        return detach_in_graphs(detached, self.replays, lambda: None)

    def call(self, number: int = 0) -> torch.Tensor:
        given = torch.linspace(-1.0, 1.0 + number, SIZE).requires_grad_()
        found: torch.Tensor = (self.layer if number in self.eagerly else self.graphs[number])(given)
        return found

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
        eagerly, self.eagerly = self.eagerly, tuple(range(MICROBATCHES))
        hooks: list[Any] = [weight._post_accumulate_grad_hooks or {} for weight in self.weights]
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


def equal(found: Any, expected: Any) -> bool:
    """Whether all are there, and have the same values."""
    return all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


class Handed:
    """Graphs whose gradients the real bucketing takes, for buckets of these many parameters."""

    def __init__(self, *sizes: int, graphed: int, sharded: bool = True) -> None:
        self.megatron = Megatron(*sizes, sharded=sharded)
        self.bucketing = GradientBucketing(self.megatron, self.megatron.take)
        parameters = self.megatron.parameters
        self.case, self.rest = Graphs(parameters[:graphed]), parameters[graphed:]
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


def first(case: Graphs) -> None:
    case.call().square().sum().backward()


def two_calls(case: Graphs) -> None:
    (case.call(0).square().sum() + case.call(1).sum()).backward()


def three_calls(case: Graphs) -> None:
    # Of a graph that is added twice all bits are those of autograd, in whatever order.
    (case.call(0).sum() + case.call(1).sum() * 0.0 + case.call(2).square().sum()).backward()


def penalty_first(case: Graphs) -> None:
    """Autograd comes to what was made last first, so the graph's gradients wait."""
    penalty = case.penalty()
    (case.call().square().sum() + penalty).backward()


def penalty_last(case: Graphs) -> None:
    output = case.call().square().sum()
    (output + case.penalty()).backward()


def graphs_of(weights: int = 3) -> tuple[Graphs, Bucketing, Callable[[], None]]:
    case, bucketing = Graphs([nn.Parameter(torch.zeros(SIZE)) for _ in range(weights)]), Bucketing()
    hook_weights(case.weights)  # there is none during capture
    return case, bucketing, case.install(bucketing)


@pytest.mark.parametrize("run", [first, two_calls, three_calls])
def test_gradients_lie_in_the_graph_unless_calls_are_summed_up(run: Run) -> None:
    case, bucketing, _ = graphs_of()
    expected = case.of_autograd(run)
    for number in (1, 2):
        run(case)
        found = list(bucketing.taken[-1].values())
        assert len(bucketing.taken) == number and equal(found, expected)
        assert [case.lies_in_a_graph(one) for one in found] == [run is first] * 3
    assert all(bucketing.borrowed) and bucketing.used == [[False] * 3] * 2
    assert all(weight.grad is None for weight in case.weights)
    # They hold until the next replay of any graph.
    case.replay_another()
    assert equal(found, expected) is (run is not first)


def test_few_weights_are_detached_too_and_a_frozen_one_is_left_out() -> None:
    case, bucketing, _ = graphs_of(2)
    case.weights[0].requires_grad_(False)
    nothing, expected = case.of_autograd(first)
    with torch.no_grad():
        assert not case.call().requires_grad and bucketing.detached == []
    first(case)
    assert nothing is None and equal(bucketing.taken[0].values(), [expected])


def fails(case: Graphs, undo: Callable[[], None]) -> None:
    """Nothing is borrowed after a backward pass that failed."""
    loss = case.call().sum()
    recorded = case.graphs[0]._recorded
    whole, recorded.backward = recorded.backward, None
    with pytest.raises(GraphResetError):
        loss.backward()
    recorded.backward = whole
    undo()


def ends(_case: Graphs, undo: Callable[[], None]) -> None:
    undo()


def has_a_hook(case: Graphs, _undo: Callable[[], None]) -> None:
    case.weights[1].register_hook(lambda gradient: gradient.clone())


@pytest.mark.parametrize("change", [fails, ends, has_a_hook])
def test_autograd_has_copies_of_what_is_attached(change: Callable[..., None]) -> None:
    case, bucketing, undo = graphs_of()
    expected = case.of_autograd(first)
    first(case)
    change(case, undo)
    first(case)
    found = [weight.grad for weight in case.weights]
    case.replay_another()
    assert equal(found, expected) and len(bucketing.taken) == 1
    assert change is has_a_hook or bucketing.detached == []
    attached = all(isinstance(graph._function, type) for graph in case.graphs)
    assert attached is (change is not has_a_hook)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "summed"])
@pytest.mark.parametrize("sizes", [(3,), (5,), (2, 4, 2)], ids=str)
def test_borrowed_gradients_go_into_each_bucket_by_one_copy(
    sizes: tuple[int, ...], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = Handed(*sizes, graphed=3 if len(sizes) == 1 else sum(sizes), sharded=sharded)
    expected = handed.case.of_autograd(first)
    for number in (1, 2):
        handed.megatron.begin()
        before = handed.bucketing.copies
        with monkeypatch.context() as nothing_is_cloned:
            nothing_is_cloned.setattr(torch.Tensor, "clone", None, raising=False)
            first(handed.case)
        assert handed.bucketing.copies == before + len(sizes)
        reduced = number - bool(handed.rest)
        assert [buffer.reduced for buffer in handed.megatron.buffers] == [reduced] * len(sizes)
        more = handed.rest_comes()
        times = 1 if sharded else number
        assert handed.megatron.has([g * times for g in [*expected, *more] if g is not None])
        assert all(parameter.grad is None for parameter in handed.megatron.parameters)


@pytest.mark.parametrize("sizes", [(3,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("eagerly", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("run", [first, two_calls, penalty_first, penalty_last])
def test_what_lies_in_the_bucket_is_what_autograd_has(
    run: Run, eagerly: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """With other uses, and microbatches that run eagerly, in whatever order they come."""
    handed = Handed(*sizes, graphed=3)
    handed.case.eagerly = eagerly
    expected = handed.case.of_autograd(run)
    for _ in range(2):
        handed.megatron.begin()
        run(handed.case)
        more = handed.rest_comes()
        assert handed.megatron.has([*expected, *more])
        handed.megatron.begin()
        handed.bucketing.refuse_what_is_left()


@pytest.mark.parametrize("change", ["report_nan_in_param_grad", "grad"])
def test_what_is_more_than_a_copy_is_done_with_copies(change: str) -> None:
    handed = Handed(4, graphed=3)
    expected = handed.case.of_autograd(first)
    if change == "grad":
        handed.megatron.parameters[0].grad = torch.zeros(SIZE)
    else:
        handed.megatron.report_nan_in_param_grad = True
    first(handed.case)
    assert handed.megatron.has([*expected, *handed.rest_comes()])


def test_buckets_are_reduced_in_the_order_of_an_eager_pass() -> None:
    """A rank that runs the layer eagerly, alone, reduces them together with the others."""
    handed = Handed(2, 2, graphed=4)
    for eagerly in ((), (0,)):
        handed.case.eagerly, handed.megatron.told = eagerly, []
        handed.megatron.begin()
        first(handed.case)
        assert [place // 2 for place in handed.megatron.told] == [1, 0]


class Unit(nn.Module):
    """An FSDP unit whose experts are called in the way that ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.refuses = way, False
        self.dense = nn.Linear(WIDTH, WIDTH)
        if way in OF_THEIR_OWN:
            # By this name Megatron-FSDP knows experts, and gives them buckets of their own.
            self.experts = nn.ModuleDict({"grouped": Grouped()})
        else:
            self.grouped = Grouped()
        if way == "neighbours":
            self.second = Grouped()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        way = self.way
        if way == "experts first":
            first: torch.Tensor = self.dense(self.all_experts()(rows).tanh())
            return first
        for _ in range(2 if way == "dense again" else 1):
            again = way == "dense again"
            rows = checkpoint(self.dense, rows, use_reentrant=True) if again else self.dense(rows)
            rows = rows.tanh()
        if self.refuses and way == "failed late":
            rows.register_hook(refuse)
        penalty = self.penalty() if way in ("used before", "renewed") else 0.0
        if way in CALLED_OFTEN:
            rows = self.called_often(rows)
        output = self.call(rows, way in ("again", "recompute"))
        if way == "neighbours":
            output = self.second(output.tanh())
        if self.refuses and way == "failed early":
            output.register_hook(refuse)
        return output + (self.penalty() if way == "used beside" else penalty)

    def penalty(self) -> torch.Tensor:
        """A second use, and other gradients, of some weights."""
        found = torch.zeros(())
        for weight in list(self.grouped.parameters())[1::2]:
            found = found + weight.square().sum() * 1e-2
        return found

    def called_often(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.call(rows, self.way == "again").tanh()
        if self.refuses and self.way == "failed":
            rows.register_hook(refuse)
        if self.way == "recomputed between":
            rows = self.call(rows, True).tanh()
        return rows

    def call(self, rows: torch.Tensor, recompute: bool) -> torch.Tensor:
        if not recompute and self.way != "evaluated":
            output: torch.Tensor = self.all_experts()(rows)
            return output
        found: torch.Tensor = checkpoint(self.all_experts(), rows, use_reentrant=recompute)
        return found

    def all_experts(self) -> Any:
        return self.experts["grouped"] if self.way in OF_THEIR_OWN else self.grouped


def refuse(_: torch.Tensor) -> None:
    raise ValueError("refused")


POOLED = ("once", "recompute", "twice", "used beside", "used before", "graphed", "hooked")
"""Usual passes, with double buffers; the last two leave all weights to autograd."""
WAYS = {
    **dict.fromkeys(POOLED, "a usual pass"),
    "renewed": "weights get other accumulators, and are also used in another way",
    "penalty outside": "own hooks run before Megatron-FSDP's root hook begins the pass",
    "hooked late": "a tensor hook is registered between forward and backward",
    "by name": "backward(inputs=weights) asks for what autograd does not see",
    "failed": "a pass that failed left gradients to wait",
    "failed early": "a pass that failed left buckets that are complete",
    "failed late": "a pass that failed left a bucket that is not complete",
    "evaluated": "forward passes without a backward pass come between, others are recomputed",
    "experts first": "the dense part's gradients wait as the experts complete the bucket",
    "neighbours": "gradients are pieces of one tensor, of two operations with one bucket",
    "alone": "no other rank has a part of the experts' gradients, which are summed up",
    "again": "a bucket that is complete gets gradients once more in the same pass",
    "dense again": "the dense part completes the bucket, and gets gradients once more",
    "recomputed between": "a call has a pass of its own, between two that have one together",
    "no gradient": "some weights get none",
    "given before": "a weight has a gradient before the pass",
    "checked": "Megatron-FSDP looks at each gradient for NaN",
}
LOUD = {"renewed", "hooked late", "by name", "failed", "failed early", "failed late", "again"}
"""Those that end in an error of the fast path's."""
CALLED_OFTEN = {"twice", "failed", "again", "recomputed between"}
OF_THEIR_OWN = {"alone", "again"}
HALFWAY = 2
"""The step in which something else happens."""


def sharded(way: str, units: list[Unit]) -> Any:
    from megatron_fsdp import fully_shard_model
    from torch.distributed.device_mesh import init_device_mesh

    names = ("ep", "dp", "tp")
    experts: Any = init_device_mesh(
        "cuda", (2, 1, 1) if way == "alone" else (1, 2, 1), mesh_dim_names=names
    )
    model: Any = fully_shard_model(
        nn.Sequential(*units, nn.Linear(WIDTH, 1)),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=names[1:]),
        expt_device_mesh=experts[names[1:]] if way in OF_THEIR_OWN else None,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Unit],
        calculate_per_token_loss=True,
        report_nan_in_param_grad=way == "checked",
        fsdp_double_buffer=way in POOLED,
        fsdp_db_use_persist_buf_on_alloc_fail=way in POOLED,
    )
    if way not in POOLED:
        model.set_model_auto_sync(False)
    if way == "hooked":
        for parameter in model.param_and_grad_buffer.params:
            parameter.register_hook(lambda gradient: gradient * 2)
    return model


def backward(way: str, model: Any, units: list[Unit], loss: torch.Tensor) -> None:
    if way == "penalty outside":
        weights = [w for unit in units for w in [*unit.grouped.parameters()][1::2]]
        model.all_gather_and_wait_parameters_ready(weights, prefetch=False)
        loss = loss + torch.stack([weight.sum() for weight in weights]).sum() * 0.3
    hooks = []
    for unit in units:
        if way == "hooked late":
            hooks.append(unit.grouped.get_parameter("weight1").register_hook(lambda g: g * 2))
        if way == "given before":
            unit.grouped.get_parameter("weight1").grad = torch.ones(WIDTH)
    if way == "by name":
        loss.backward(inputs=list(model.param_and_grad_buffer.params))
    else:
        loss.backward()
    for hook in hooks:
        hook.remove()


def given_to(number: int) -> torch.Tensor:
    found = torch.arange(2.0 * PARTS * WIDTH).reshape(2 * PARTS, WIDTH) + dist.get_rank()
    return (found * (1 + number)).sin().requires_grad_()


def happens(
    way: str, model: Any, units: list[Unit], patch: pytest.MonkeyPatch, *, fast: bool
) -> None:
    """Let a pass fail, if that is the way, or let one that follows have what it must not."""
    if way == "checked":
        patch.setattr(Grouped, "factor", torch.inf)
    if way == "renewed" and fast:
        raw: Any = SimpleNamespace(parameters=lambda: model.param_and_grad_buffer.params)
        forget_accumulators([raw])
    if way.startswith("failed"):
        units[0].refuses = True
        with pytest.raises(ValueError, match="refused"):
            model(given_to(0)).square().sum().backward()
        units[0].refuses = False


def fit(way: str, fast: bool) -> dict[str, Any]:
    """Losses, up to an error and with its name, where there is one; and weights taken at once."""
    from megatron_fsdp import fully_shard_optimizer

    from megatron_cg import fastpath as fast_path

    torch.manual_seed(0)
    units = [Unit(way), Unit(way)]
    model = sharded(way, units)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.003))
    found, taken, own = list[str](), list[int](), GradientBucketing.take_detached

    def take(bucketing: Any, weights: Any, *rest: Any, **how: Any) -> None:
        taken.append(len(weights.weights))
        own(bucketing, weights, *rest, **how)

    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucketing, "take_detached", take)
        patch.setattr(Grouped, "neighbours", way in {"neighbours", "alone"})
        patch.setattr(Grouped, "without", (1, PARTS - 1) if way == "no gradient" else ())
        for step in range(STEPS + (way in POOLED)):
            if fast and step == 1:
                path = fast_path.install(model)
                undo.callback(path.close)
                assert path.bucketing is not None and "gradients" in path.parts
                graphed = set(model.modules()) if way == "graphed" else set()
                detached = DetachedWeights(model.module, path.bucketing, graphed)
                undo.callback(detach_in(PLACE, NAME, detached))
            optimizer.zero_grad()
            if step == HALFWAY:
                happens(way, model, units, patch, fast=fast)
            for microbatch in range(2):
                try:
                    loss = model(given_to(step + 4 * microbatch)).square().sum()
                    found.append(repr(loss.item()))
                    backward(way, model, units, loss)
                except (FastPathError, ValueError) as error:
                    return {"losses": [*found, type(error).__name__], "taken": taken}
            if way == "evaluated":
                with torch.no_grad():
                    found.append(repr(model(given_to(0)).sum().item()))
                model.synchronize_param_gather()
            if way not in POOLED:
                model.finish_grad_sync()
            optimizer.step()
    return {"losses": found, "taken": taken}


def fit_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        try:
            found[way] = [fit(way, False), fit(way, True)]
        except Exception as error:
            # A failure of its own, that says nothing of the others.
            found[way] = [{"losses": []}, {"losses": [repr(error)]}]
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    pytest.importorskip("megatron_fsdp")
    return on_ranks(fit_all)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_same_or_there_is_an_error(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        eager, fast = (run["losses"] for run in found[way])
        loud = fast[-1] == FastPathError.__name__
        until = len(fast) - loud
        assert fast[:until] == eager[:until] and loud == (way in LOUD), WAYS[way]
        assert len(fast) == len(eager) or loud
        assert (eager[-1] == ValueError.__name__) == (way == "checked")
        if way in POOLED:
            passes = 0 if way in ("graphed", "hooked") else 2 * STEPS * 2
            assert found[way][1]["taken"] == [PARTS] * passes and not found[way][0]["taken"]


GEMMS, INTO, OUT = 6, 4, 8


def gemm(
    one: list[Any], other: list[Any], out: list[Any], *_: Any, layout: str = "TN", **__: Any
) -> Any:
    """What ``general_grouped_gemm`` computes, in its three layouts."""
    if layout == "NT":
        for a, b, place in zip(one, other, out, strict=True):
            place.copy_(b.t() @ a)
    else:
        parts = [b @ (a.t() if layout == "TN" else a) for a, b in zip(one, other, strict=True)]
        out[0].copy_(torch.cat(parts))
    return out, [None] * GEMMS, None


def test_the_gradients_of_tes_own_grouped_gemm_are_one_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="TE is not installed")
    module = te.module.grouped_linear
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "general_grouped_gemm", gemm)
    monkeypatch.setattr(module, "clear_tensor_data", lambda *_: None)
    own = module._GroupedLinear
    grouped = te.GroupedLinear(
        GEMMS, INTO, OUT, bias=False, params_dtype=torch.float32, device="cpu"
    )
    grouped.prepare_forward, grouped.end_forward = (lambda rows, **_: rows), (lambda: None)
    grouped.activation_dtype = torch.float32
    torch.manual_seed(0)
    for parameter in grouped.parameters():
        nn.init.normal_(parameter)
    hook_weights(grouped.parameters())
    given, splits = torch.randn(18, INTO, requires_grad=True), [0, 7, 2, 0, 8, 1]
    grouped(given, splits).square().sum().backward()
    expected, of_rows = [weight.grad for weight in grouped.parameters()], given.grad
    given.grad = None
    grouped.zero_grad()
    bucketing = Bucketing()
    undo = install_detached(detached_of(grouped, bucketing))
    grouped(given, splits).square().sum().backward()
    undo()
    (found,) = bucketing.taken
    assert torch.equal(given.grad, of_rows)  # type: ignore[arg-type]
    assert equal(found.values(), expected) and in_one_piece(list(found.values())) is not None
    assert all(weight.grad is None for weight in grouped.parameters())
    assert module._GroupedLinear is own
