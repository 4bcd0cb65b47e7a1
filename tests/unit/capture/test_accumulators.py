"""Accumulators that an old graph of autograd holds on to, and new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.capture.accumulators import forget_accumulators


def accumulator(parameter: nn.Parameter) -> Any:
    node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_still_held_no_longer_decides(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    seen: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    held = model(torch.ones(1, 2, dtype=dtype)).sum()
    held.backward()
    before = [
        (p.data_ptr(), p.dtype, p.shape, p.grad, p.tolist(), id(p)) for p in model.parameters()
    ]
    nodes = [accumulator(p) for p in model.parameters()]
    assert nodes == [accumulator(p) for p in model.parameters()]
    forget_accumulators([model, model[0]])
    assert not set(nodes) & {accumulator(p) for p in model.parameters()}
    assert before == [
        (p.data_ptr(), p.dtype, p.shape, p.grad, p.tolist(), id(p)) for p in model.parameters()
    ]
    seen.clear()
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    assert {id(p) for p in seen} == {id(p) for p in model.parameters()}
    assert held.grad_fn is not None
