"""Doubles of torch.cuda's streams and events, which record their calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Self

import torch

import megatron_cg.fastpath  # noqa: F401 - all modules that ask for the stream
from megatron_cg.fastpath import buckets as fast_streams
from megatron_cg.tools.cpu.fakes import FakeEvent, FakeStream, replaced
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.sites import caller
from tests.unit.ordering.trace import Await, AwaitStream, HostAwaits, Keep, Record

MAIN = 0


class Streams:
    """The streams of one run; the first one is the default one."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._all: list[Stream] = []
        self.current = self.new("the main stream")

    def new(self, name: str) -> Stream:
        """Another stream."""
        stream = Stream(self, len(self._all))
        self._all.append(stream)
        self.notes.trace.streams[stream.cuda_stream] = name
        return stream

    def handle(self) -> int:
        """As the fast path's ``current_stream``."""
        return self.current.cuda_stream

    def made(self, *_args: object, **_kwargs: object) -> Stream:
        """As ``torch.cuda.Stream``."""
        return self.new(f"the stream made at {caller()}")

    def with_handle(self, handle: int, *_args: object, **_kwargs: object) -> Stream:
        """As ``torch.cuda.ExternalStream``."""
        return self._all[handle]

    def get(self, *_args: object, **_kwargs: object) -> Stream:
        """As ``torch.cuda.current_stream``."""
        return self.current

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_args: object, **_kwargs: object) -> None:
        """As ``torch.cuda.synchronize``."""
        self.notes.add(HostAwaits(site=caller()))

    def event(self, *_args: object, **_kwargs: object) -> Event:
        """As ``torch.cuda.Event``."""
        return Event(self)


class Stream(FakeStream):
    """One stream, known by its number."""

    def __init__(self, streams: Streams, number: int) -> None:
        super().__init__()
        self._streams = streams
        self.stream_id = self.cuda_stream = number

    def wait_stream(self, stream: Any) -> None:
        self._add(AwaitStream(self.cuda_stream, stream.cuda_stream, caller()))

    def wait_event(self, event: Any) -> None:
        self._add(Await(self.cuda_stream, event.number, caller()))

    def record_event(self, event: Any = None) -> Any:
        event = event or self._streams.event()
        self._add(Record(event.number, self.cuda_stream, caller()))
        return event

    def synchronize(self) -> None:
        self._add(HostAwaits(stream=self.cuda_stream, site=caller()))

    def __enter__(self) -> Self:
        raise NotImplementedError("with torch.cuda.stream(...) is what is modelled")

    def _add(self, entry: Any) -> None:
        self._streams.notes.add(entry)


class Event(FakeEvent):
    """One event, known by its number."""

    _numbers = count()

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.number = next(self._numbers)
        self._streams = streams

    def record(self, stream: Any = None) -> None:
        stream = stream or self._streams.current
        self._streams.notes.add(Record(self.number, stream.cuda_stream, caller()))

    def wait(self, stream: Any = None) -> None:
        stream = stream or self._streams.current
        self._streams.notes.add(Await(stream.cuda_stream, self.number, caller()))

    def synchronize(self) -> None:
        self._streams.notes.add(HostAwaits(event=self.number, site=caller()))


@contextmanager
def modelled_streams(streams: Streams) -> Iterator[None]:
    """Let torch.cuda's names lead to ``streams``."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        number = streams.notes.number_of(tensor.untyped_storage())
        streams.notes.add(Keep(number, stream.cuda_stream, caller()))

    names = {
        "Stream": streams.made,
        "ExternalStream": streams.with_handle,
        "Event": streams.event,
        "stream": streams.entered,
        "current_stream": streams.get,
        "synchronize": streams.synchronize,
    }
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(replaced(torch.Tensor, "record_stream", record_stream))
        asks = fast_streams.current_stream  # For a raw handle; without a GPU there is none.
        for module in [*sys.modules.values()]:
            if vars(module).get("current_stream") is asks:
                stack.enter_context(replaced(module, "current_stream", streams.handle))
        yield
