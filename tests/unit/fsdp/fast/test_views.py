"""Tensors that lie side by side, and those that only seem to."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.fsdp.fast.views import in_one_piece


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
