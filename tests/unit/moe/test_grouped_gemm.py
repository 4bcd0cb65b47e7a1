"""The grouped GEMM against one GEMM per expert, with the counts on the host and on the device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_cg.moe import one_tensor
from megatron_cg.moe.grouped_gemm import GroupedGemm
from megatron_cg.tools.cpu.grouped_linear import _GroupedLinear

COUNTS = ([3, 5, 4], [0, 12, 0], [12, 0, 0], [0, 0, 0], [1, 0, 11])
IN, OUT = 16, 24


def weights_in_one_bucket(experts: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As Megatron-FSDP's parameters lie in a bucket, with something between them."""
    bucket = torch.randn(5 + experts * (OUT * IN + 8)).to(dtype)
    starts = (5 + index * (OUT * IN + 8) for index in range(experts))
    parts = (bucket[start : start + OUT * IN].view(OUT, IN) for start in starts)
    return [part.detach().requires_grad_() for part in parts]


def results(function: Any, rows: torch.Tensor, counts: torch.Tensor, weights: Any) -> Any:
    """Output of the counted rows, and gradients of these rows and of the weights."""
    used = int(counts.sum())
    rows = rows.detach().clone().requires_grad_()
    for weight in weights:
        weight.grad = None
    output, copies = function.apply(rows, counts, (), None, None, *weights)
    assert copies == [None] * len(weights)
    scale = torch.linspace(-1, 1, OUT).to(output.dtype)
    (output[:used] * scale).sum().backward()
    assert rows.grad is not None
    return [output[:used], rows.grad[:used], *(weight.grad for weight in weights)]


@pytest.mark.parametrize("more", [0, 4], ids=["all rows counted", "more rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", COUNTS, ids=str)
def test_it_computes_what_one_gemm_per_expert_computes(
    given: list[int], dtype: torch.dtype, more: int
) -> None:
    counts, weights = torch.tensor(given), weights_in_one_bucket(len(given), dtype)
    rows = torch.randn(int(counts.sum()), IN).to(dtype)
    # What lies in rows that no expert has must not reach a result.
    padded = torch.cat([rows, torch.full((more, IN), torch.nan, dtype=dtype)])
    ours = results(GroupedGemm, padded, counts, weights)
    theirs = results(_GroupedLinear, rows, counts, weights)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_gradients_of_weights_are_views_of_one_tensor() -> None:
    weights = weights_in_one_bucket(3, torch.bfloat16)
    results(GroupedGemm, torch.randn(6, IN).bfloat16(), torch.tensor([1, 2, 3]), weights)
    storages = {
        weight.grad.untyped_storage().data_ptr() for weight in weights if weight.grad is not None
    }
    assert len(storages) == 1


def test_what_needs_no_gradient_gets_none() -> None:
    weights = [weight.detach() for weight in weights_in_one_bucket(2, torch.float32)]
    rows = torch.randn(4, IN, requires_grad=True)
    apply: Any = GroupedGemm.apply
    output, _ = apply(rows, torch.tensor([1, 3]), (), None, None, *weights)
    output.sum().backward()
    assert rows.grad is not None
    trained = weights_in_one_bucket(2, torch.float32)
    output, _ = apply(rows.detach(), torch.tensor([1, 3]), (), None, None, *trained)
    output.sum().backward()
    assert all(weight.grad is not None for weight in trained)


def test_without_autograd_it_takes_no_context() -> None:
    weights = weights_in_one_bucket(2, torch.float32)
    with torch.no_grad():
        output, _ = GroupedGemm.forward(
            None, torch.randn(2, 2, IN), torch.tensor([1, 3]), (), None, None, *weights
        )
    assert output.shape == (2, 2, OUT)


def test_weights_in_a_bucket_are_not_copied() -> None:
    weights = weights_in_one_bucket(3, torch.bfloat16)
    whole = one_tensor.as_one(weights)
    assert whole.data_ptr() == weights[0].data_ptr()
    assert torch.equal(whole, torch.stack(weights))


def shuffled(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weights[1], weights[0], weights[2]]


def apart(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in weights]


def transposed(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    square = [weight[:IN, :IN] for weight in weights]
    return [square[0].t(), *square[1:]]


def overlapping(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weights[0][:2], weights[0][1:3], weights[0][2:4]]


@pytest.mark.parametrize("way", [shuffled, apart, transposed, overlapping])
def test_weights_that_lie_otherwise_are_copied(
    way: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(one_tensor, "_copied", set())
    weights = way(weights_in_one_bucket(3, torch.bfloat16))
    with caplog.at_level(logging.INFO), torch.no_grad():
        for _ in range(2):
            assert torch.equal(one_tensor.as_one(weights), torch.stack(weights))
    (message,) = caplog.messages
    assert "3 expert weights" in message and f"({3 * weights[0].nbytes} bytes)" in message
