"""TE's contract for capture-time hooks, read from the installed transformer-engine itself.

TE's compiled extension takes minutes to build and is not needed for this: the functions that
state the contract are pure Python, so they are taken out of ``graph.py`` by their syntax tree and
run as they are. So are TE's capture and replays, on the double of ``torch.cuda``: the function that
replays is found, replaced, and its gradients borrowed.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.backends.te_backend import replay_function
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fsdp.roles import unit_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import cells_of
from tests.unit.backends.cuda_double import DEFAULT, CudaDouble
from tests.unit.te_sources import functions_of_te, loops_of_te


def hooks_of_both_layers(model: Any) -> tuple[list[Any], list[Any]]:
    from megatron_cg.tape.cpu_model import transformer_layers

    model.module._replace_param_with_raw_if_needed()
    layers: list[Any] = list(transformer_layers(model))
    units = [Unit(f"layer {i}", layer, tuple(layer.children())) for i, layer in enumerate(layers)]
    return layers, [unit_hooks(unit).capture_time for unit in units]


def test_te_runs_our_hooks_in_every_phase(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, hooks = hooks_of_both_layers(dense_model)
    contract = functions_of_te(monkeypatch)
    assert contract["_canonicalize_capture_time_hooks"](len(layers), hooks) == hooks
    states = []
    for phase in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        contract["_run_capture_time_hooks"](hooks, 0, phase, layers[0])
        states.append(layers[0]._training_state.name)
    assert states == ["FORWARD", "IDLE", "PRE_BACKWARD", "IDLE"]


WIDTH = 3


class Product(nn.Module):
    """The sum of all inputs, times the product of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.linspace(1.0, 2.0, WIDTH))
        self.two = nn.Parameter(torch.linspace(-1.0, 3.0, WIDTH))

    def forward(self, *inputs: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum([*inputs, *more.values()], torch.zeros(WIDTH))
        return total * self.one * self.two


@pytest.fixture
def te(cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return loops_of_te(monkeypatch)


def captured(
    te: Callable[..., Any], arguments: int = 2, delayed: tuple[bool, bool] = (False, False)
) -> tuple[Any, Product]:
    """The graph of a product of ``arguments`` inputs and, by keyword, one more; its module.

    ``delayed`` says of each weight whether its gradient is computed later than in the backward.
    """
    module, samples = Product(), [zeros() for _ in range(arguments)]
    for weight, later in zip(module.parameters(), delayed, strict=True):
        weight.skip_backward_post_hook = later  # type: ignore[attr-defined]
    (graph,) = te(CaptureRequest((module,), [tuple(samples)], [{"more": zeros()}]))
    return graph, module


def zeros() -> torch.Tensor:
    return torch.zeros(WIDTH, requires_grad=True)


def inputs_of(arguments: int = 2) -> list[torch.Tensor]:
    return [torch.full((WIDTH,), 1.0 + place) for place in range(arguments)]


class Noting:
    """Applied instead of a function, and then the function itself."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, list[tuple[Any, ...]]()

    def apply(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.function.apply(*args)


@pytest.mark.parametrize("arguments", [0, 1, 3])
def test_the_weights_come_last_and_others_before_them(
    te: Callable[..., Any], arguments: int
) -> None:
    graph, module = captured(te, arguments)
    replay = replay_function(graph)
    noting = Noting(replay.function)
    inputs, more = inputs_of(arguments), torch.full((WIDTH,), 0.5)
    replay.replace(noting)
    assert torch.equal(graph(*inputs, more=more), Product()(*inputs, more=more))
    ((*own, inside_one, inside_two),) = noting.calls
    assert (inside_one, inside_two) == (module.one, module.two)
    assert len(own) == replay.first_weight == 3 + arguments + 1
    assert own[:3] == [None, DEFAULT, None] and all(map(torch.equal, own[3:], [*inputs, more]))


def test_what_replaces_it_is_called_until_the_undo(te: Callable[..., Any]) -> None:
    (graph, module), (other, _) = captured(te), captured(te)
    replay = replay_function(graph)
    noting = Noting(replay.function)
    undo = replay.replace(noting)
    inputs, more = inputs_of(), torch.ones(WIDTH)
    graph(*inputs, more=more)
    # Each sample has a function of its own.
    other(*inputs, more=more)
    assert len(noting.calls) == 1
    undo()
    graph(*inputs, more=more).sum().backward()
    assert len(noting.calls) == 1 and replay_function(graph).function is replay.function
    eager = Product()
    eager(*inputs, more=more).sum().backward()
    for weight, expected in zip(module.parameters(), eager.parameters(), strict=True):
        assert weight.grad is not None and expected.grad is not None
        assert torch.equal(weight.grad, expected.grad)


def lie_there(function: Any, module: Product) -> list[bool]:
    """Which gradients of a replay lie in static memory; the values are right wherever they do."""
    context, inputs = SimpleNamespace(), [*inputs_of(), torch.ones(WIDTH)]
    with torch.no_grad():
        function.forward(context, None, DEFAULT, None, *inputs, module.one, module.two)
        found = list(function.backward(context, torch.ones(WIDTH)))
    static = cells_of(inspect.unwrap(function.backward))["static_grad_inputs"].cell_contents
    total, product = sum(inputs, torch.zeros(WIDTH)), (module.one * module.two).detach()
    expected = [*[product] * 3, total * module.two, total * module.one]
    assert found[:3] == [None, None, None] and all(map(torch.equal, found[3:], expected))
    return [one.data_ptr() == own.data_ptr() for one, own in zip(found[3:], static, strict=True)]


@pytest.mark.parametrize("delayed", [(False, False), (True, False)], ids=["all", "one delayed"])
def test_gradients_are_borrowed_until_the_undo(
    te: Callable[..., Any], delayed: tuple[bool, bool]
) -> None:
    graph, module = captured(te, delayed=delayed)
    replay = replay_function(graph)
    assert replay.needs == (True,)
    for _ in range(2):
        assert lie_there(replay.function, module) == [True] * 3 + [*delayed]
        end_borrowing = replay.borrow()
        assert lie_there(replay.function, module) == [True] * 5
        end_borrowing()


@pytest.mark.parametrize(
    "name",
    [
        *("graphed", "Graphed", "len_user_args"),
        *("returned_param_grad_clone_slots", "static_grad_outputs"),
    ],
)
def test_a_variable_that_is_gone_is_named_with_package_and_version(
    cuda: CudaDouble, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_cg.upstream.symbols.installed_version", lambda _: "2.99")
    graph, _ = captured(loops_of_te(monkeypatch, renamed=name))
    with pytest.raises(UpstreamChangedError) as found:
        replay_function(graph)
    said = str(found.value)
    assert f"variable {name} " in said and "transformer-engine 2.99" in said
    assert "transformer_engine.pytorch.graph" in said
    assert "make_graphed_autograd_function" in said
