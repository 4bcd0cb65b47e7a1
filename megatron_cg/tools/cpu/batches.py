"""Batches of real tokens; the same process and step get the same batch in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """Endless (tokens, labels), each (batch, sequence) int64; ranks take turns in the stream.

    ``prefix`` names a dataset in Megatron's indexed format; None uses the bytes of Python's own
    ``os.py``. Each id is taken modulo ``vocabulary``. ``group`` has the ranks that take turns, all
    if None.
    """

    def __init__(
        self,
        prefix: Path | None,
        batch: int,
        sequence: int,
        vocabulary: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        stream = _text() if prefix is None else _indexed(prefix)
        # A stream shorter than a sequence repeats, as in Megatron's own datasets.
        stream = stream.repeat(sequence // stream.numel() + 1)
        self._stream = stream % vocabulary
        self._batch, self._sequence = batch, sequence
        self._next, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._count = max(1, (stream.numel() - 1) // sequence)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for _ in range(self._batch):
            start = (self._next % self._count) * self._sequence
            rows.append(self._stream[start : start + self._sequence + 1])
            self._next += self._ranks
        block = torch.stack(rows)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def _text() -> torch.Tensor:
    data = Path(os.__file__).read_bytes()
    return torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8).astype(numpy.int64))


def _indexed(prefix: Path, limit: int = 2**20) -> torch.Tensor:
    """Return the first documents of a dataset as one stream of about ``limit`` tokens."""
    documents, length = [], 0
    for document in IndexedDataset(str(prefix)):
        documents.append(numpy.asarray(document, dtype=numpy.int64))
        length += documents[-1].size
        if length >= limit:
            break
    return torch.from_numpy(numpy.concatenate(documents))
