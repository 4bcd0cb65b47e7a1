"""Views of a bucket's pieces, one per parameter, cached if the bucket stays in place."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class

_STAYS = "FixedPoolAllocator"
"""The allocator of ``--fsdp-double-buffer``: a bucket uses one of two buffers that are never freed.
Cached views of other allocators' buffers would keep freed memory alive."""

RELIES_ON = (
    *fsdp_class(_STAYS),
    *fsdp_class("DataParallelBuffer", "temporary_bucket_allocator", "is_data_distributed"),
    *fsdp_class("DataParallelBuffer", "param_idx", "get_item_from_bucket"),
)


class BucketViews:
    """Views of one bucket, in the parameters' shapes.

    They are cached as long as the bucket is the same memory. The check compares storages and not
    addresses: a view keeps its storage alive, so no new storage can be mistaken for it.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        pooled = type(buffer.temporary_bucket_allocator).__name__ == _STAYS
        # An unsharded buffer is its own bucket and is allocated once.
        self._kept = pooled or not buffer.is_data_distributed
        self._place: tuple[int, int] | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._wholes: dict[Hashable, torch.Tensor | None] = {}

    def of(self, bucket: Any, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """One view for each of ``parameters``, in the bucket's dtype."""
        if not self._kept:
            return [self._cut(bucket, parameter) for parameter in parameters]
        self._look(bucket)
        return [self._views[id(parameter)] for parameter in parameters]

    def whole(
        self, bucket: Any, key: Hashable, parameters: Sequence[nn.Parameter]
    ) -> torch.Tensor | None:
        """One view of all ``parameters`` if they are adjacent, else None; cached by ``key``."""
        if not self._kept:
            return in_one_piece(self.of(bucket, parameters))
        self._look(bucket)
        if key not in self._wholes:
            self._wholes[key] = in_one_piece(self.of(bucket, parameters))
        return self._wholes[key]

    def _look(self, bucket: Any) -> None:
        place = (bucket.data.untyped_storage()._cdata, bucket.data.storage_offset())
        if place != self._place:
            self._place = place
            self._views = {id(p): self._cut(bucket, p) for p in self._buffer.params}
            self._wholes = {}

    def _cut(self, bucket: Any, parameter: nn.Parameter) -> torch.Tensor:
        item = self._buffer.param_idx[parameter]
        piece: torch.Tensor = self._buffer.get_item_from_bucket(bucket, item)
        return piece.view(parameter.shape)


def in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over ``tensors`` if they are adjacent in memory, in this order; else None.

    A grouped GEMM computes all weights' gradients as pieces of one tensor, and its weights may be
    adjacent in their bucket. A copy of one tensor costs less to launch than a copy of many.
    """
    first = tensors[0]
    address = end = first.data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    size = (end - address) // first.itemsize
    return first.as_strided((size,), (1,))
