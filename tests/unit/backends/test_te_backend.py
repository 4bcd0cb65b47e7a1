"""What the TE backend checks before capture and puts back after it, without a GPU; TE's contract.

TE's compiled extension takes minutes to build. The functions that state the contract for
capture-time hooks are pure Python, so they are taken out of the installed ``graph.py`` by their
syntax tree and run as they are. So are TE's capture and replays, on the double of ``torch.cuda``:
the function that replays is found, replaced, and its gradients borrowed.
"""

import gc
import inspect
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from megatron_cg.backends import te_backend as transformer_engine
from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.fsdp.roles import unit_hooks
from megatron_cg.replay.unit import Unit
from megatron_cg.tape.train import transformer_layers
from megatron_cg.upstream.patch import cells_of
from tests.unit.backends.cuda_double import DEFAULT, CudaDouble, cuda_double
from tests.unit.te_sources import functions_of_te, loops_of_te

replay_function = transformer_engine.TransformerEngineBackend.replay_function


class QuantizationState:
    """TE's interface of that name; ``recipe`` is None where FP8 is off."""

    recipe: Any = None
    updates = 0

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        cls.updates += 1

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe

    get_autocast_state = get_fp8_recipe

    @classmethod
    def set_autocast_state(cls, state: Any) -> None:
        cls.recipe = state


def old_capture(modules: Any, sample_args: Any, pool: Any = None) -> Any:
    """As before TE 2.19."""


def new_capture(
    modules: Any, sample_args: Any, pool: Any = None, capture_time_hooks: Any = None
) -> Any:
    """As since TE 2.19."""


def fake_te(monkeypatch: pytest.MonkeyPatch, make: Any = new_capture) -> types.SimpleNamespace:
    """Modules by TE's names; returns its flag and the states of its tracker."""
    te = types.SimpleNamespace(capturing=False, states={"te": torch.Generator()})
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".pytorch": {},
        ".pytorch.distributed": {"get_all_rng_states": lambda: te.states},
        ".pytorch.quantization": {"FP8GlobalStateManager": QuantizationState},
        ".pytorch.graph": {
            "make_graphed_callables": make,
            "is_graph_capturing": lambda: te.capturing,
            "set_capture_start": lambda: setattr(te, "capturing", True),
            "set_capture_end": lambda: setattr(te, "capturing", False),
        },
    }
    for name, members in contents.items():
        module = types.ModuleType(f"transformer_engine{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return te


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> transformer_engine.TransformerEngineBackend:
    fake_te(monkeypatch)
    return transformer_engine.TransformerEngineBackend()


def test_a_te_without_capture_time_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te(monkeypatch, old_capture)
    with pytest.raises(UpstreamChangedError, match=r"transformer-engine .*make_graphed_callables"):
        transformer_engine.TransformerEngineBackend()


def test_scales_of_all_modules_are_not_updated_by_a_pass_outside_of_training(
    backend: transformer_engine.TransformerEngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizationState, "updates", 0)
    before = vars(QuantizationState)["reduce_and_update_fp8_tensors"]
    with backend.without_updates():
        QuantizationState.reduce_and_update_fp8_tensors(forward=False)
    assert QuantizationState.updates == 0
    assert vars(QuantizationState)["reduce_and_update_fp8_tensors"] is before
    QuantizationState.reduce_and_update_fp8_tensors(forward=False)
    assert QuantizationState.updates == 1


class Plain(nn.Linear):
    """A class without ``__call__`` of its own."""


class Own(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_what_a_failed_capture_leaves_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    te = fake_te(monkeypatch)
    backend = transformer_engine.TransformerEngineBackend()
    layers = [Plain(1, 1), Own(1, 1)]
    own, rng = Own.__call__, torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in capture"), backend.preserved(layers):
        te.capturing = True
        Plain.__call__ = Own.__call__ = lambda *_: None  # type: ignore[method-assign]
        torch.rand(3)
        gc.disable()
        raise RuntimeError("in capture")
    assert "__call__" not in vars(Plain) and Own.__call__ is own
    assert torch.equal(torch.get_rng_state(), rng)
    assert gc.isenabled() and not te.capturing


def test_a_capture_that_fails_is_over_before_it_is_undone() -> None:
    def make(modules: Any, samples: Any, capture_time_hooks: Any = None, **_options: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            raise LookupError("in the warmup")

    with cuda_double() as cuda, pytest.MonkeyPatch.context() as patch:
        fake_te(patch, make)
        with pytest.raises(LookupError):
            transformer_engine.TransformerEngineBackend().capture(CaptureRequest((), []))
        assert not cuda.running


def test_what_te_is_asked_for_is_what_megatron_asked_for() -> None:
    modules, samples = (nn.Linear(1, 1), nn.Linear(1, 1)), [(torch.ones(1),), (torch.ones(1),)]
    asked: dict[str, Any] = {
        "sample_kwargs": [{"mask": torch.ones(1)}, {}],
        "num_warmup_iters": 1,
        "allow_unused_input": True,
        "retain_graph_in_backward": True,
        "_order": [1, -1],
        "_num_layers_per_chunk": [2],
        "_reuse_graph_input_output_buffers": True,
        "fp8_enabled": False,
    }
    request = transformer_engine.request_of(modules, samples, **asked)
    assert (request.callables, request.args) == (modules, samples)
    assert transformer_engine.options_of(request) == {**asked, "capture_time_hooks": [{}, {}]}
    with pytest.raises(CaptureError, match=r"order of passes is \[1, 1, -1, -1\]"):
        transformer_engine.request_of(modules, samples, **asked | {"_order": [1, 1, -1, -1]})
    with pytest.raises(CaptureError, match="2 samples for 1 callables: each callable has one"):
        transformer_engine.request_of(modules[:1], samples)


class DelayedScaling(nn.Module):
    """TE's interface for the state of delayed scaling."""

    def __init__(self) -> None:
        super().__init__()
        tensors = {"scale": torch.ones(2), "amax_history": torch.zeros(4, 2)}
        self.fp8_meta = {
            key: types.SimpleNamespace(**{name: value.clone() for name, value in tensors.items()})
            for key in ("scaling_fwd", "scaling_bwd")
        }

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]]:
        return {k: [m.scale.clone(), m.amax_history.clone()] for k, m in self.fp8_meta.items()}

    def reset_fp8_meta_tensors(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        for key, (scale, history) in tensors.items():
            self.fp8_meta[key].scale.copy_(scale)
            self.fp8_meta[key].amax_history.copy_(history)


def test_scales_and_histories_of_delayed_scaling_are_put_back(
    backend: transformer_engine.TransformerEngineBackend,
) -> None:
    scaled = DelayedScaling()
    with backend.preserved([nn.Sequential(scaled)]):
        scaled.fp8_meta["scaling_bwd"].scale.fill_(7)
        scaled.fp8_meta["scaling_fwd"].amax_history.fill_(7)
    assert scaled.fp8_meta["scaling_bwd"].scale.eq(1).all()
    assert scaled.fp8_meta["scaling_fwd"].amax_history.eq(0).all()


def test_numerics_are_the_recipe_where_fp8_is_on(
    backend: transformer_engine.TransformerEngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.numerics() is None
    monkeypatch.setattr(QuantizationState, "recipe", "delayed")
    options = {"fp8_enabled": (False, True), "fp8_recipe": "delayed"}
    assert backend.captured_numerics(1, options) == backend.numerics() == "delayed"
    assert backend.captured_numerics(0, options) is None
    assert backend.captured_numerics(0, {"enabled": True, "recipe": "tensorwise"}) == "tensorwise"
    with backend.preserved([]):
        monkeypatch.setattr(QuantizationState, "recipe", "tensorwise")
    assert backend.numerics() == "delayed"


def test_scales_and_histories_are_what_a_graph_holds_of_fp8(
    backend: transformer_engine.TransformerEngineBackend,
) -> None:
    scaled = DelayedScaling()
    rows = list(backend.entries([scaled, nn.Linear(1, 1)]))
    before = [row.holder.get(row.key) for row in rows]
    scaled.fp8_meta["scaling_bwd"].amax_history = torch.zeros(8, 2)
    now = [row.holder.get(row.key) for row in rows]
    changed = [row.what for row, a, b in zip(rows, before, now, strict=True) if a is not b]
    assert changed == ["amax_history of scaling_bwd of a DelayedScaling"]


def test_te_runs_our_hooks_in_every_phase(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_model.module._replace_param_with_raw_if_needed()
    layers: list[Any] = list(transformer_layers(dense_model))
    units = [Unit(f"layer {i}", layer, tuple(layer.children())) for i, layer in enumerate(layers)]
    hooks = [unit_hooks(unit).capture_time for unit in units]
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


def noting_of(function: Any) -> Any:
    """Applied instead of a function, and then the function itself."""
    return Mock(apply=Mock(side_effect=function.apply))


@pytest.mark.parametrize("arguments", [0, 1, 3])
def test_the_weights_come_last_and_others_before_them(
    te: Callable[..., Any], arguments: int
) -> None:
    graph, module = captured(te, arguments)
    replay = replay_function(graph)
    noting = noting_of(replay.function)
    inputs, more = inputs_of(arguments), torch.full((WIDTH,), 0.5)
    replay.replace(noting)
    assert torch.equal(graph(*inputs, more=more), Product()(*inputs, more=more))
    (call,) = noting.apply.call_args_list
    *own, inside_one, inside_two = call.args
    assert (inside_one, inside_two) == (module.one, module.two)
    assert len(own) == replay.first_weight == 3 + arguments + 1
    assert own[:3] == [None, DEFAULT, None] and all(map(torch.equal, own[3:], [*inputs, more]))


def test_what_replaces_it_is_called_until_the_undo(te: Callable[..., Any]) -> None:
    (graph, module), (other, _) = captured(te), captured(te)
    replay = replay_function(graph)
    noting = noting_of(replay.function)
    undo = replay.replace(noting)
    inputs, more = inputs_of(), torch.ones(WIDTH)
    graph(*inputs, more=more)
    # Each sample has a function of its own.
    other(*inputs, more=more)
    assert noting.apply.call_count == 1
    undo()
    graph(*inputs, more=more).sum().backward()
    assert noting.apply.call_count == 1 and replay_function(graph).function is replay.function
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
