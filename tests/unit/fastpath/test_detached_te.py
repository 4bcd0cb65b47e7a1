"""TE's own grouped GEMM with detached weights; a fake replaces its kernel on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, install_detached
from megatron_cg.fastpath.gradients.views import in_one_piece
from tests.unit.fastpath.bucketing_doubles import Bucketing, hook_weights

te = pytest.importorskip("transformer_engine.pytorch", reason="TE is not installed")
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


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = te.module.grouped_linear
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "general_grouped_gemm", gemm)
    monkeypatch.setattr(module, "clear_tensor_data", lambda *_: None)
    own = module._GroupedLinear
    made = te.GroupedLinear(GEMMS, INTO, OUT, bias=False, params_dtype=torch.float32, device="cpu")
    made.prepare_forward, made.end_forward = (lambda rows, **_: rows), (lambda: None)
    made.activation_dtype = torch.float32
    torch.manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    hook_weights(made.parameters())
    yield made
    assert module._GroupedLinear is own


def test_its_gradients_are_the_same_and_one_tensor(grouped: Any) -> None:
    rows, splits = torch.randn(18, INTO, requires_grad=True), [0, 7, 2, 0, 8, 1]
    grouped(rows, splits).square().sum().backward()
    expected, of_rows = [weight.grad for weight in grouped.parameters()], rows.grad
    rows.grad = None
    grouped.zero_grad()
    bucketing: Any = Bucketing()
    undo = install_detached(DetachedWeights(nn.Sequential(grouped), bucketing))
    grouped(rows, splits).square().sum().backward()
    with torch.no_grad():
        grouped(rows, splits)
    undo()
    ((found, _),) = bucketing.taken
    assert torch.equal(rows.grad, of_rows)  # type: ignore[arg-type]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert all(weight.grad is None for weight in grouped.parameters())
    assert in_one_piece(found) is not None
