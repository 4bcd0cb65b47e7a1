"""TE's contract for capture-time hooks, read from the installed transformer-engine itself.

TE's compiled extension takes minutes to build and is not needed for this: the functions that
state the contract are pure Python, so they are taken out of ``graph.py`` by their syntax tree and
run as they are. So are those around TE's replay function, which is found, replaced, and its
gradients borrowed. Their graphs compute on static tensors when they are replayed, as CUDA's do.
"""

import ast
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_cg.backends.te.te_backend import replay_function
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fsdp.roles import unit_hooks
from megatron_cg.replay.unit import Unit
from tests.unit.te_sources import source_of_te

CONTRACT = ("_canonicalize_capture_time_hooks", "_run_capture_time_hooks")


@pytest.fixture(scope="module")
def graph_source() -> ast.Module:
    return ast.parse(source_of_te("graph.py").read_text())


@pytest.fixture(scope="module")
def contract(graph_source: ast.Module) -> dict[str, Any]:
    wanted: list[ast.stmt] = []
    for node in graph_source.body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if getattr(node, "name", None) in CONTRACT or "_CAPTURE_TIME_HOOK_NAMES" in names:
            wanted.append(node)
    scope: dict[str, Any] = {"torch": __import__("torch")}
    exec("from typing import Dict, List, Optional", scope)
    exec(compile(ast.Module(wanted, []), "graph.py", "exec"), scope)
    return scope


def hooks_of_both_layers(model: Any) -> tuple[list[Any], list[Any]]:
    from megatron_cg.tape.cpu_model import transformer_layers

    model.module._replace_param_with_raw_if_needed()
    layers: list[Any] = list(transformer_layers(model))
    units = [Unit(f"layer {i}", layer, tuple(layer.children())) for i, layer in enumerate(layers)]
    return layers, [unit_hooks(unit).capture_time for unit in units]


def test_te_runs_our_hooks_in_every_phase(contract: dict[str, Any], dense_model: Any) -> None:
    layers, hooks = hooks_of_both_layers(dense_model)
    assert contract["_canonicalize_capture_time_hooks"](len(layers), hooks) == hooks
    states = []
    for phase in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        contract["_run_capture_time_hooks"](hooks, 0, phase, layers[0])
        states.append(layers[0]._training_state.name)
    assert states == ["FORWARD", "IDLE", "PRE_BACKWARD", "IDLE"]


def test_te_captures_a_backward_pass_that_a_reentrant_checkpoint_can_be_in(
    graph_source: ast.Module,
) -> None:
    """torch refuses it in a pass that names its inputs; see ``full_recompute.py``."""
    calls = [
        node
        for node in ast.walk(graph_source)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.autograd.")
    ]
    passes = [call for call in calls if ast.unparse(call.func) == "torch.autograd.backward"]
    assert len(passes) >= 3 and not any(
        "inputs" in {keyword.arg for keyword in call.keywords} for call in passes
    )
    assert not any(ast.unparse(call.func) == "torch.autograd.grad" for call in calls)


STREAM, WIDTH = "the current stream", 3
OUTER = ("_GraphedCallableHelpers",)
INNER = ("_returned_param_grad_clone_slots", "make_graphed_autograd_function")
FORWARD = "make_graphed_forward"


class Product(nn.Module):
    """The sum of all inputs, times the product of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.linspace(1.0, 2.0, WIDTH))
        self.two = nn.Parameter(torch.linspace(-1.0, 3.0, WIDTH))

    def forward(self, *inputs: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum([*inputs, *more.values()], torch.zeros(WIDTH))
        return total * self.one * self.two


def te_code(tree: ast.Module, renamed: str = "") -> dict[str, Any]:
    """TE's functions by name; where a variable is renamed, as another version might have it."""
    found: dict[str, Any] = {getattr(node, "name", ""): node for node in ast.walk(tree)}
    text = "\n".join(ast.unparse(found[name]) for name in (*OUTER, *INNER, FORWARD))
    if renamed:
        text = re.sub(rf"\b{renamed}\b", f"{renamed}_of_next_year", text)
    fp8 = SimpleNamespace(is_fp8_enabled=bool, is_first_fp8_module=bool)
    cuda = SimpleNamespace(current_stream=lambda: STREAM)
    scope: dict[str, Any] = {
        "torch": SimpleNamespace(autograd=torch.autograd, Tensor=torch.Tensor, cuda=cuda),
        "FP8GlobalStateManager": fp8,
        "_tree_flatten": tree_flatten,
        "_tree_unflatten": tree_unflatten,
        "cache_quantized_params": False,
        "clone_param_grads_on_return": True,
    }
    exec("from typing import Callable, NamedTuple", scope)
    exec(compile(text, "graph.py", "exec"), scope)
    return scope


class Captured:
    """A product of ``arguments`` inputs and, by keyword, one more; captured by TE's own code.

    ``delayed`` says of each weight whether its gradient is computed later than in the backward.
    """

    def __init__(
        self, code: dict[str, Any], arguments: int = 2, delayed: tuple[bool, bool] = (False, False)
    ) -> None:
        self.module = Product()
        self.weights = tuple(self.module.parameters())
        for weight, later in zip(self.weights, delayed, strict=True):
            weight.skip_backward_post_hook = later  # type: ignore[attr-defined]
        self.inputs = [torch.zeros(WIDTH) for _ in range(arguments + 1)]
        self.output, self.gradient = torch.zeros(WIDTH), torch.zeros(WIDTH)
        self.back = tuple(torch.zeros(WIDTH) for _ in (*self.inputs, *self.weights))
        self.graphed, self.helpers = code["make_graphed_autograd_function"](
            SimpleNamespace(replay=self.forward),
            SimpleNamespace(replay=self.backward),
            self.weights,
            ["more"],
            len(self.inputs),
            tree_flatten(torch.zeros(()))[1],
            (*self.inputs, *self.weights),
            (self.output,),
            (self.gradient,),
            self.back,
            code["_returned_param_grad_clone_slots"](self.back, self.weights),
        )
        own = self.module.forward
        helpers = self.helpers
        self.function = code[FORWARD](self.module, True, self.graphed, own, set(), helpers)

    def forward(self) -> None:
        one, two = self.weights
        self.output.copy_(sum(self.inputs, torch.zeros(WIDTH)) * one * two)

    def backward(self) -> None:
        *of_inputs, of_one, of_two = self.back
        (one, two), total = self.weights, sum(self.inputs, torch.zeros(WIDTH))
        for gradient in of_inputs:
            gradient.copy_(self.gradient * one * two)
        of_one.copy_(self.gradient * total * two)
        of_two.copy_(self.gradient * total * one)

    def arguments(self) -> list[torch.Tensor]:
        return [torch.full((WIDTH,), 1.0 + place) for place in range(len(self.inputs) - 1)]


class Noting:
    """Applied instead of a function, and then the function itself."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, list[tuple[Any, ...]]()

    def apply(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.function.apply(*args)


@pytest.fixture(scope="module")
def code(graph_source: ast.Module) -> dict[str, Any]:
    return te_code(graph_source)


@pytest.mark.parametrize("arguments", [0, 1, 3])
def test_the_weights_come_last_and_others_before_them(code: dict[str, Any], arguments: int) -> None:
    captured = Captured(code, arguments)
    graph = captured.function
    replay = replay_function(graph)
    noting = Noting(replay.function)
    inputs, more = captured.arguments(), torch.full((WIDTH,), 0.5)
    expected = Product()(*inputs, more=more)
    replay.replace(noting)
    assert torch.equal(graph(*inputs, more=more), expected)
    ((*own, inside_one, inside_two),) = noting.calls
    assert (inside_one, inside_two) == captured.weights and len(own) == replay.first_weight
    assert own[:3] == [None, STREAM, None]
    assert all(map(torch.equal, own[3:], [*inputs, more])) and len(own) == 3 + arguments + 1


def test_what_replaces_it_is_called_until_the_undo(code: dict[str, Any]) -> None:
    captured, other = Captured(code), Captured(code)
    graph = captured.function
    replay = replay_function(graph)
    noting = Noting(replay.function)
    undo = replay.replace(noting)
    inputs, more = captured.arguments(), torch.ones(WIDTH)
    graph(*inputs, more=more)
    # Each sample has a function of its own.
    other.function(*inputs, more=more)
    assert len(noting.calls) == 1
    undo()
    graph(*inputs, more=more).sum().backward()
    assert len(noting.calls) == 1 and replay_function(graph).function is replay.function
    eager = Product()
    eager(*inputs, more=more).sum().backward()
    for weight, expected in zip(captured.weights, eager.parameters(), strict=True):
        assert weight.grad is not None and expected.grad is not None
        assert torch.equal(weight.grad, expected.grad)


def backward_of(captured: Captured, function: Any) -> list[Any]:
    context = SimpleNamespace()
    with torch.no_grad():
        inputs = [*captured.arguments(), torch.ones(WIDTH)]
        function.forward(context, None, STREAM, None, *inputs, *captured.weights)
        return list(function.backward(context, torch.ones(WIDTH)))


def lie_there(captured: Captured, found: list[Any]) -> list[bool]:
    """Which gradients lie in static memory; the values are right wherever they do."""
    assert found[:3] == [None, None, None]
    assert all(map(torch.equal, found[3:], captured.back))
    pairs = zip(found[3:], captured.back, strict=True)
    return [one.data_ptr() == static.data_ptr() for one, static in pairs]


@pytest.mark.parametrize("delayed", [(False, False), (True, False)], ids=["all", "one delayed"])
def test_gradients_are_borrowed_until_the_undo(
    code: dict[str, Any], delayed: tuple[bool, bool]
) -> None:
    captured, inputs = Captured(code, delayed=delayed), [True] * 3
    replay = replay_function(captured.function)
    assert replay.needs == (True,)
    for _ in range(2):
        assert lie_there(captured, backward_of(captured, replay.function)) == [*inputs, *delayed]
        end_borrowing = replay.borrow()
        assert lie_there(captured, backward_of(captured, replay.function)) == [*inputs, True, True]
        end_borrowing()


@pytest.mark.parametrize(
    "name",
    [
        *("graphed", "Graphed", "len_user_args"),
        *("returned_param_grad_clone_slots", "static_grad_outputs"),
    ],
)
def test_a_variable_that_is_gone_is_named_with_package_and_version(
    graph_source: ast.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_cg.upstream.symbols.installed_version", lambda _: "2.99")
    captured = Captured(te_code(graph_source, renamed=name))
    with pytest.raises(UpstreamChangedError) as found:
        replay_function(captured.function)
    said = str(found.value)
    assert f"variable {name} " in said and "transformer-engine 2.99" in said
    assert "transformer_engine.pytorch.graph" in said
    assert "make_graphed_autograd_function" in said
