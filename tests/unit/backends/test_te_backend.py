"""What the TE backend checks before capture and puts back after it, without a GPU or TE."""

import gc
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.backends import te_backend as transformer_engine
from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import CaptureError, UpstreamChangedError
from tests.unit.backends.cuda_double import cuda_double


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

    @classmethod
    def get_autocast_state(cls) -> Any:
        return cls.recipe

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
    rows = backend.entries([scaled, nn.Linear(1, 1)])
    before = [row.holder.get(row.key) for row in rows]
    scaled.fp8_meta["scaling_bwd"].amax_history = torch.zeros(8, 2)
    now = [row.holder.get(row.key) for row in rows]
    changed = [row.what for row, a, b in zip(rows, before, now, strict=True) if a is not b]
    assert changed == ["amax_history of scaling_bwd of a DelayedScaling"]
