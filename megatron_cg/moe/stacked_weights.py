"""The weights of all local experts as one tensor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch

logger = logging.getLogger(__name__)
_ALIGNMENT = 16
"""Bytes; ``grouped_mm`` refuses other addresses."""
_copied: set[tuple[int, ...]] = set()


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[experts, out, in]`` of weights ``[out, in]`` each, all of one shape and dtype.

    The result is a view if the weights lie in one storage at equal distances and aligned, as in a
    bucket of Megatron-FSDP. Otherwise it is a copy, which is logged once per shape.
    """
    first = weights[0]
    distance = _distance(weights)
    if distance is not None:
        return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))
    shape = (len(weights), *first.shape)
    if shape not in _copied:
        _copied.add(shape)
        logger.info(
            "megatron_cg: %d expert weights of %s do not lie aligned at equal distances in one "
            "storage, so each grouped GEMM copies them (%d bytes).",
            *(len(weights), tuple(first.shape), len(weights) * first.nbytes),
        )
    return torch.stack(tuple(weights))


def _distance(weights: Sequence[torch.Tensor]) -> int | None:
    """Elements from one weight to the next in their storage; None if that differs."""
    first = weights[0]
    storage = first.untyped_storage()._cdata
    if first.storage_offset() * first.itemsize % _ALIGNMENT or any(
        one.untyped_storage()._cdata != storage or one.stride() != first.stride() for one in weights
    ):
        return None
    if len(weights) == 1:
        return first.numel()
    distances = {b.storage_offset() - a.storage_offset() for a, b in pairwise(weights)}
    found = int(distances.pop())
    if distances or found < first.numel() or found * first.itemsize % _ALIGNMENT:
        return None
    return found
