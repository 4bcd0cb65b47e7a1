"""Where a trace is written, and the numbers of storages in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

import torch

from tests.unit.ordering.trace import Entry, Release, Span, Trace


class Notes:
    """A trace that is being written."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.on = False
        self._numbers = count()
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """By the address of torch's object, which another storage may get once it is gone."""

    def add(self, entry: Entry) -> None:
        """Record the entry, if the trace is on."""
        if self.on:
            self.trace.entries.append(entry)

    def tracing(self) -> AbstractContextManager[None]:
        """The trace is on in the block."""
        return self._switched(on=True)

    def paused(self) -> AbstractContextManager[None]:
        """The trace is off in the block."""
        return self._switched(on=False)

    @contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage has a number."""
        return storage._cdata in self._known

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The storage's number, for as long as it exists; its end is recorded."""
        key = storage._cdata
        found = self._known.get(key)
        if found is not None:
            return found[0]
        number = next(self._numbers)

        def gone(_reference: object) -> None:
            self._known.pop(key, None)
            self.add(Release(number))

        self._known[key] = number, weakref.ref(storage, gone)
        return number

    def span_of(self, tensor: torch.Tensor) -> Span | None:
        """The bytes from the first to the last one that ``tensor`` uses, or None where none."""
        elements = tensor.numel()
        if not tensor.is_cpu or elements == 0:
            return None
        if tensor.is_contiguous():
            reach = elements - 1
        else:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((n - 1) * step for n, step in steps)
        start = int(tensor.storage_offset()) * tensor.itemsize
        number = self.number_of(tensor.untyped_storage())
        return Span(number, start, start + (reach + 1) * tensor.itemsize)

    def name(self, tensor: torch.Tensor, text: str) -> None:
        """Name the storage of ``tensor``; the first name stays."""
        if tensor.device.type == "cpu":
            number = self.number_of(tensor.untyped_storage())
            self.trace.storages.setdefault(number, text)
