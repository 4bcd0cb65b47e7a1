"""The fakes against Transformer Engine itself, where it is installed.

TE's own Python runs on the meta device, with fakes for its kernels only: what it keeps for the
backward pass is its own choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cg.tools.plan.fake_machine import simulated_gpus
from megatron_cg.tools.plan.fakes import experts
from megatron_cg.tools.plan.fakes.packages import FAKES, TE_VERSION

LINEAR: dict[str, Any] = {"in_features": 32, "out_features": 64, "params_dtype": torch.bfloat16}
NORM: dict[str, Any] = {"normalized_shape": 32, "params_dtype": torch.bfloat16}
FAKED = SimpleNamespace(**FAKES["transformer_engine.pytorch"])
RUN: list[tuple[str, dict[str, Any]]] = [
    ("Linear", {**LINEAR, "bias": False}),
    ("Linear", {**LINEAR, "bias": True, "parallel_mode": "column"}),
    ("Linear", {**LINEAR, "bias": True, "parallel_mode": "row"}),
    ("LayerNormLinear", {**LINEAR, "bias": False, "normalization": "RMSNorm"}),
    ("LayerNormLinear", {**LINEAR, "bias": True, "normalization": "LayerNorm"}),
    ("RMSNorm", NORM),
    ("LayerNorm", NORM),
]
BUILT: list[tuple[str, dict[str, Any]]] = [
    *RUN,
    ("GroupedLinear", {**LINEAR, "num_gemms": 4, "bias": False}),
    ("GroupedLinear", {**LINEAR, "num_gemms": 4, "bias": True}),
    ("DotProductAttention", {"num_attention_heads": 4, "kv_channels": 16}),
]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = pytest.importorskip("transformer_engine.pytorch", reason="TE is not installed")
    path = "transformer_engine.pytorch"
    for module in ("linear", "layernorm_linear"):
        monkeypatch.setattr(f"{path}.module.{module}.general_gemm", experts.general_gemm)
    monkeypatch.setattr(f"{path}.module.layernorm_linear.apply_normalization", normalized)
    monkeypatch.setattr(f"{path}.ops.basic.rmsnorm.rmsnorm_fwd", rms_normed)
    monkeypatch.setattr(f"{path}.ops.basic.layer_norm.layernorm_fwd", layer_normed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _tensor: True))
    with simulated_gpus():
        yield package


def normalized(inp: Tensor, _out: Any, _weight: Any, bias: Tensor | None, *_rest: Any) -> Any:
    statistics = [inp.new_empty(inp.shape[0], dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(inp), statistics[0] if bias is not None else None, statistics[1]


def rms_normed(inp: Tensor, *_rest: Any) -> Any:
    return normalized(inp, None, None, None)


def layer_normed(inp: Tensor, weight: Tensor, bias: Tensor, *_rest: Any) -> Any:
    return normalized(inp, None, weight, bias)


def made(module: Any, name: str, settings: dict[str, Any]) -> torch.nn.Module:
    device = {} if name == "DotProductAttention" else {"device": "meta"}
    found: torch.nn.Module = getattr(module, name)(**settings, **device)
    return found


def test_the_fakes_are_of_the_installed_release(te: Any) -> None:
    import transformer_engine

    assert str(transformer_engine.__version__).split("+", maxsplit=1)[0] == TE_VERSION


@pytest.mark.parametrize(("name", "settings"), BUILT)
def test_parameters_are_those_of_the_original(te: Any, name: str, settings: dict[str, Any]) -> None:
    original, fake = made(te, name, settings), made(FAKED, name, settings)
    assert described(fake) == described(original)


def described(module: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, p.shape, p.dtype) for name, p in module.named_parameters()]


@pytest.mark.parametrize(("name", "settings"), RUN)
def test_backward_finds_what_the_original_keeps(
    te: Any, name: str, settings: dict[str, Any]
) -> None:
    assert kept(made(FAKED, name, settings)) == kept(made(te, name, settings))


def kept(module: torch.nn.Module) -> tuple[torch.Size, list[int]]:
    """The output's shape, and the bytes of what is saved beside input and parameters."""
    inp = torch.empty(16, 2, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    known = {id(t.untyped_storage()) for t in (inp, *module.parameters())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            saved[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(inp)
    return out.shape, sorted(storage.nbytes() for storage in saved.values())
