"""Which kernels multiply by experts does not depend on how much cuBLASLt remembers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.heuristics import (
    ENTRIES,
    VARIABLE,
    capacity,
    install_heuristics,
    remember,
)
from tests.functional.conftest import skip_without

EXPERTS, INPUT, OUTPUT = 8, 512, 768
ROUTINGS = [
    [64] * EXPERTS,
    [512, 0, 0, 0, 0, 0, 0, 0],
    [1, 2, 3, 5, 7, 11, 13, 470],
    [99, 101, 37, 59, 61, 67, 71, 17],
]
"""Tokens of each expert; 512 in all."""


def passes(experts: nn.Module) -> list[torch.Tensor]:
    """Outputs and all gradients of each routing."""
    made = []
    generator = torch.Generator("cuda").manual_seed(1)
    for routing in ROUTINGS:
        rows = torch.randn(
            512, INPUT, device="cuda", dtype=torch.bfloat16, generator=generator
        ).requires_grad_()
        output = experts(rows, routing)
        weights = list(experts.parameters())
        made += [output, *torch.autograd.grad(output.float().square().sum(), [rows, *weights])]
    return made


def test_the_same_bits_with_nothing_and_with_everything_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_without(1)
    import transformer_engine.pytorch as te

    monkeypatch.delenv(VARIABLE, raising=False)
    experts = te.GroupedLinear(
        EXPERTS, INPUT, OUTPUT, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    before = capacity()
    assert remember(0) == 0
    try:
        forgotten = passes(experts)
    finally:
        remember(before)
    undo = install_heuristics(nn.Sequential(experts))
    try:
        assert capacity() == ENTRIES
        first, again = passes(experts), passes(experts)
    finally:
        undo()
    assert capacity() == before
    for one, other, last in zip(forgotten, first, again, strict=True):
        assert torch.equal(one, other) and torch.equal(one, last)
