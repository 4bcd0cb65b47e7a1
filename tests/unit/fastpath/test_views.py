"""Tensors that lie side by side, and those that only seem to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.buckets import BucketViews, in_one_piece


def test_neighbours_are_one_tensor_of_the_same_memory() -> None:
    whole = torch.arange(36.0)
    pieces = [piece.view(3, 4) for piece in whole.split(12)]
    found = in_one_piece(pieces[1:])
    assert found is not None
    assert found.data_ptr() == pieces[1].data_ptr() and torch.equal(found, whole[12:])
    assert in_one_piece(pieces[:1]) is not None


def other_order(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[4:8], whole[:4]]


def with_a_gap(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:4], whole[8:12]]


def another_dtype(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:4], whole.view(torch.int32)[4:8]]


def strided(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:4], whole[4:].view(2, -1)[:, :2]]


@pytest.mark.parametrize("cut", [other_order, with_a_gap, another_dtype, strided])
def test_others_are_not(cut: object) -> None:
    assert callable(cut)
    assert in_one_piece(cut(torch.zeros(16))) is None


def test_neighbours_in_memory_of_two_storages_are_not() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    halves = [torch.frombuffer(memory.numpy()[start:], dtype=torch.uint8, count=32)
              for start in (0, 32)]  # fmt: skip
    assert halves[0].data_ptr() + 32 == halves[1].data_ptr()
    assert halves[0].untyped_storage().nbytes() == 32
    assert in_one_piece(halves) is None


def a_buffer(allocator: str) -> Any:
    """Four parameters, the last two of which lie the other way round."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    return SimpleNamespace(
        params=parameters,
        param_idx=dict(zip(parameters, (0, 1, 3, 2), strict=True)),
        temporary_bucket_allocator=type(allocator, (), {})(),
        is_data_distributed=True,
        get_item_from_bucket=lambda bucket, place: bucket.data[2 * place : 2 * place + 2],
    )


@pytest.mark.parametrize("allocator", ["FixedPoolAllocator", "StorageResizeBased"])
def test_a_whole_is_of_its_own_parameters_and_of_where_they_lie_now(allocator: str) -> None:
    buffer = a_buffer(allocator)
    views, parameters = BucketViews(buffer), buffer.params
    memory = torch.arange(16.0)
    # Another storage, and another place in it.
    for data in (torch.arange(8.0) + 20, memory[:8], memory[8:]):
        bucket = SimpleNamespace(data=data)
        for _ in range(2):
            first = views.whole(bucket, "first", parameters[:2])
            second = views.whole(bucket, "second", parameters[1:2])
            assert first is not None and first.data_ptr() == data.data_ptr()
            assert first.tolist() == data[:4].tolist()
            assert second is not None and second.tolist() == data[2:4].tolist()
            assert views.whole(bucket, "others", parameters[2:]) is None


@pytest.mark.parametrize(
    ("allocator", "once"), [("FixedPoolAllocator", True), ("StorageResizeBased", False)]
)
def test_a_whole_is_cut_once_only_where_memory_stays(allocator: str, once: bool) -> None:
    buffer = a_buffer(allocator)
    views, bucket = BucketViews(buffer), SimpleNamespace(data=torch.arange(8.0))
    first, again = (views.whole(bucket, "key", buffer.params[:2]) for _ in range(2))
    assert first is not None and (first is again) == once
