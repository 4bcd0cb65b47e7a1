"""Main weights go into model weights by slices that are cut once for each buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.main_weights import install_main_weights

SIZES = (2, 0, 3)


class Buffer:
    """One kind of weights of a bucket; counts how often a slice is cut."""

    is_data_distributed = True

    def __init__(self, params: list[Any], dtype: torch.dtype) -> None:
        self.param_idx = {parameter: index for index, parameter in enumerate(params)}
        self.data = torch.zeros(sum(SIZES), dtype=dtype)
        self.cut = 0

    def get_item(self, index: int, *, only_shard: bool) -> torch.Tensor:
        assert only_shard
        self.cut += 1
        start = sum(SIZES[:index])
        return self.data[start : start + SIZES[index]]


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of one bucket, with the table instead of Megatron-FSDP's copy."""
    monkeypatch.setattr(
        "megatron_cg.fastpath.main_weights.float8_test", lambda _fsdp: lambda _p: False
    )
    params: list[Any] = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    model, main = Buffer(params, torch.bfloat16), Buffer(params, torch.float32)
    group = SimpleNamespace(params=params, model_weight_buffer=model, main_weight_buffer=main)
    store = SimpleNamespace(
        parameter_groups=[group], copy_main_weights_to_model_weights=lambda: None
    )
    install_main_weights(SimpleNamespace(param_and_grad_buffer=store))
    return SimpleNamespace(copy=store.copy_main_weights_to_model_weights, model=model, main=main)


@pytest.mark.parametrize("moved", ["model", "main"])
def test_slices_are_cut_once_for_as_long_as_both_buffers_stay(buffers: Any, moved: str) -> None:
    both = (buffers.model, buffers.main)

    def copied(value: float) -> list[int]:
        """The number of slices that were cut of each buffer for one copy."""
        for buffer in both:
            buffer.cut = 0
        buffers.main.data.fill_(value)
        buffers.copy()
        assert buffers.model.data.tolist() == [value] * sum(SIZES)
        return [buffer.cut for buffer in both]

    assert copied(1.0) == [len(SIZES)] * 2
    assert copied(2.0) == [0, 0]
    buffer = getattr(buffers, moved)
    buffer.data = buffer.data.clone()
    assert copied(3.0) == [len(SIZES)] * 2
    assert copied(4.0) == [0, 0]
