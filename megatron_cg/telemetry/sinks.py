"""Where captures, counts and warnings of a run are written, such as its record."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Memory = dict[str, int]


class Sink(logging.Handler, ABC):
    """The record of one rank. As a handler of logging it gets warnings and errors too."""

    @abstractmethod
    def note(self, key: str, value: Any) -> None: ...
    @abstractmethod
    def add_capture(self, capture: Mapping[str, Any]) -> None: ...


_active: list[Sink] = []


def is_recorded() -> bool:
    """Whether the run of this process is recorded."""
    return bool(_active)


def note(key: str, value: Any) -> None:
    """Store ``value``, anything JSON can hold, under ``key`` in this rank's record.

    Does nothing when nothing is recorded. A note made after training is written too.
    """
    for sink in _active:
        sink.note(key, value)


def add_capture(capture: Mapping[str, Any]) -> None:
    """Add the report of one capture."""
    for sink in _active:
        sink.add_capture(capture)


@contextmanager
def recording(sink: Sink) -> Iterator[None]:
    """Send notes, captures and warnings of this package to ``sink`` inside the block."""
    package = logging.getLogger("megatron_cg")
    package.addHandler(sink)
    _active.append(sink)
    try:
        yield
    finally:
        _active.remove(sink)
        package.removeHandler(sink)


def memory() -> Memory | None:
    """Bytes of this process on the current GPU, or None if it uses none.

    Tensors and graphs hold ``allocated_bytes``; ``reserved_bytes`` also includes the allocator's
    cache. Read from torch's allocator, without a query to the GPU.
    """
    if not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats()
    return {
        f"{kind}_bytes": stats[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved")
    }
