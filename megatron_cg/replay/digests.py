"""Digests of tensors, by which two trainings of one step are compared without a copy of either.

Note [Two sums]
    A digest has two sums of a tensor's bit pattern in integers of 64 bits, which wrap: plain, and
    weighted by position. So NaN equals NaN, 0.0 differs from -0.0, and an exchange of two elements
    is seen. With position ``columns * row + column`` the second is made of the sums of rows and of
    columns, and no tensor as large as the first is needed. Sums of integers are exact in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from megatron_cg.replay.dtensors import local

_COLUMNS = 4096
_KINDS = ("result", "gradient", "buffer", "attribute", "random state")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """The digests of these tensors, by name; None counts as absent. Nothing waits for the GPU."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._kinds: dict[str, Any] = {}
        self._sums: dict[str, torch.Tensor] = {}
        for first, value in named:
            name, tensor = first, local(value)
            while name in self._kinds:
                name = f"{name}'"
            if isinstance(tensor, torch.Tensor):
                self._kinds[name] = tensor.dtype, tensor.shape
                self._sums[name] = _sums(tensor.detach())
            elif value is not None:
                self._kinds[name] = repr(value)

    def __str__(self) -> str:
        kinds = Counter(next(filter(name.startswith, _KINDS), "other") for name in self._kinds)
        return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items())

    def differences(self, other: Digests) -> list[str]:
        """The names of what differs, in the order of both. Waits for the GPU."""
        ours, theirs = self._by_name(), other._by_name()
        return [n for n in dict.fromkeys([*ours, *theirs]) if ours.get(n) != theirs.get(n)]

    def _by_name(self) -> dict[str, Any]:
        sums = {name: pair.tolist() for name, pair in self._sums.items()}
        return {name: (kind, sums.get(name)) for name, kind in self._kinds.items()}


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """See Note [Two sums]."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    words = tensor.contiguous().flatten().view(torch.uint8)
    size = max(n for n in _WORDS if words.numel() % n == 0 and words.storage_offset() % n == 0)
    words = words.view(_WORDS[size])
    whole = words.numel() // _COLUMNS * _COLUMNS
    parts = (words[:whole].view(whole // _COLUMNS, _COLUMNS), words[whole:].unsqueeze(0))
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = plain.clone()
    for start, part in zip((0, whole), parts, strict=True):
        if part.numel():
            rows, columns = part.sum(1, dtype=torch.int64), part.sum(0, dtype=torch.int64)
            plain += rows.sum()
            weighted += (rows * _places(start, rows.numel(), part.shape[1], rows)).sum()
            weighted += (columns * _places(0, columns.numel(), 1, rows)).sum()
    return torch.stack((plain, weighted))


def _places(start: int, count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(start + 1, start + 1 + count * step, step, device=like.device)
