"""Doubles of CUDA's streams and events, and of collectives on them, which record their calls.

Collectives are put on streams as torch 2.11's ProcessGroupNCCL does, and run by gloo. An
asynchronous one runs on a stream of its communicator, after what is on the current stream at the
call; a stream that needs its result waits for the work. One that is not asynchronous
(``opts.asyncOp`` false) runs on the current stream itself, and there is nothing to wait for.
Collectives of one communicator on two streams are not taken to be in order.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Work

import megatron_cg.fastpath  # noqa: F401 - all modules that ask for the stream
from megatron_cg.backends.calls import tensors_in
from megatron_cg.fastpath import bucketing as fast_streams
from megatron_cg.tape.fakes import FakeEvent, FakeStream, replaced
from tests.unit.ordering.trace import (
    Await,
    AwaitStream,
    HostAwaits,
    Keep,
    Launch,
    Record,
    Span,
    Trace,
    caller,
)

#: Methods of torch 2.11's ProcessGroup that return a Work.
_METHODS = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)
#: ATen names of those whose first argument is written and second read; others do both with all.
_FROM_SECOND_TO_FIRST = frozenset(
    {
        *("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_"),
        *("allgather_into_tensor_coalesced_", "alltoall_", "alltoall_base_", "reduce_scatter_"),
        "reduce_scatter_tensor_coalesced_",
    }
)


class Stream(FakeStream):
    """One stream, known by its number."""

    def __init__(self, trace: Trace, number: int) -> None:
        super().__init__()
        self._trace = trace
        self.stream_id = self.cuda_stream = number

    def wait_stream(self, stream: Any) -> None:
        self._trace.add(AwaitStream(self.cuda_stream, stream.cuda_stream, caller()))

    def wait_event(self, event: Any) -> None:
        self._trace.add(Await(self.cuda_stream, event.number, caller()))

    def record_event(self, event: Any = None) -> Any:
        event = event or Event(self._trace)
        self._trace.add(Record(event.number, self.cuda_stream, caller()))
        return event

    def synchronize(self) -> None:
        self._trace.add(HostAwaits(stream=self.cuda_stream, site=caller()))

    def __enter__(self) -> Self:
        raise NotImplementedError("with torch.cuda.stream(...) is what is modelled")


class Event(FakeEvent):
    _numbers = count()

    def __init__(self, trace: Trace, *_args: object, **_kwargs: object) -> None:
        super().__init__()
        self.number = next(self._numbers)
        self._trace = trace

    def record(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        stream.record_event(self)

    def wait(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        stream.wait_event(self)

    def synchronize(self) -> None:
        self._trace.add(HostAwaits(event=self.number, site=caller()))


class Device:
    """The streams of one run, the first one is the default one, and its collectives."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._all: list[Stream] = []
        self.current = self._new("the main stream")
        self._of_group: dict[str, Stream] = {}
        self._of_work: weakref.WeakKeyDictionary[Any, Event] = weakref.WeakKeyDictionary()
        self._running: Stream | None = None
        """What a collective runs on, while a method of a process group is called."""

    def _new(self, name: str) -> Stream:
        stream = Stream(self.trace, len(self._all))
        self._all.append(stream)
        self.trace.streams[stream.cuda_stream] = name
        return stream

    def _handle(self) -> int:
        return self.current.cuda_stream

    @contextmanager
    def _entered(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def launch(self, func: Any, args: Sequence[Any]) -> None:
        """Put the kernel of a collective on its stream.

        Raises NotImplementedError where it is not known whether it is asynchronous.
        """
        if self._running is None:
            raise NotImplementedError(f"{func} comes from none of the modelled methods")
        one_way = func._schema.name.partition("::")[2] in _FROM_SECOND_TO_FIRST
        read, written = (args[1:2], args[:1]) if one_way else (args, args)
        reads, writes = self._spans(read), self._spans(written)
        self.trace.add(Launch(self._running.cuda_stream, func.name(), reads, writes, caller()))

    def _spans(self, values: Sequence[Any]) -> tuple[Span, ...]:
        spans = map(self.trace.span_of, tensors_in(values))
        return tuple(span for span in spans if span is not None)

    def _call(self, method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        options = [given for given in (*args, *kwargs.values()) if hasattr(given, "asyncOp")]
        if not all(given.asyncOp for given in options):
            with self.on_current_stream():
                return method(group, *args, **kwargs)
        own, event = self._stream_of(group), Event(self.trace)
        self.trace.add(AwaitStream(own.cuda_stream, self.current.cuda_stream))
        with self._running_on(own):
            work = method(group, *args, **kwargs)
        self.trace.add(Record(event.number, own.cuda_stream))
        if work is not None:
            self._of_work[work] = event
        return work

    def _method(self, name: str) -> Callable[..., Any]:
        original = getattr(ProcessGroup, name)

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(original, group, *args, **kwargs)

        return method

    def on_current_stream(self) -> AbstractContextManager[None]:
        """Collectives in the block run on the current stream, as those of a graph."""
        return self._running_on(self.current)

    @contextmanager
    def _running_on(self, stream: Stream) -> Iterator[None]:
        before, self._running = self._running, stream
        try:
            yield
        finally:
            self._running = before

    def _stream_of(self, group: Any) -> Stream:
        if group.group_name not in self._of_group:
            name = f"the stream of group {group.group_name} ({group.group_desc})"
            self._of_group[group.group_name] = self._new(name)
        return self._of_group[group.group_name]

    @contextmanager
    def modelled(self) -> Iterator[None]:
        """Let torch.cuda's names and process groups lead here."""
        original_wait = Work.wait

        def wait(work: Any, *args: Any) -> Any:
            with self.trace.switched(on=False):
                done = original_wait(work, *args)  # gloo makes copies that NCCL does not need.
            event = self._of_work.get(work)
            if event is not None:
                self.current.wait_event(event)
            return done

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            number = self.trace.number_of(tensor.untyped_storage())
            self.trace.add(Keep(number, stream.cuda_stream, caller()))

        names: dict[str, Callable[..., Any]] = {
            "Stream": lambda *_, **__: self._new(f"the stream made at {caller()}"),
            "ExternalStream": lambda handle, *_, **__: self._all[handle],
            "Event": functools.partial(Event, self.trace),
            "stream": self._entered,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: self.trace.add(HostAwaits(site=caller())),
        }
        with ExitStack() as stack:
            for name, value in names.items():
                stack.enter_context(replaced(torch.cuda, name, value))
            stack.enter_context(replaced(torch.Tensor, "record_stream", record_stream))
            asks = fast_streams.current_stream  # For a raw handle; without a GPU there is none.
            for module in [*sys.modules.values()]:
                if vars(module).get("current_stream") is asks:
                    stack.enter_context(replaced(module, "current_stream", self._handle))
            for name in _METHODS:
                stack.enter_context(replaced(ProcessGroup, name, self._method(name)))
            stack.enter_context(replaced(Work, "wait", wait))
            yield
