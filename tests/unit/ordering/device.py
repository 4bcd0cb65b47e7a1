"""A double of CUDA's device, which records its streams, events, collectives and operations.

ATen operations are kernels on the current stream, and storages are as the allocator sees them.
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
from functools import cache
from itertools import count
from typing import Any, Self

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Work
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_cg.fastpath  # noqa: F401 - all modules that ask for the stream
from megatron_cg.backends import calls
from megatron_cg.backends.calls import tensors_in
from megatron_cg.fastpath import bucketing as fast_streams
from megatron_cg.tape import tape_backend
from megatron_cg.tape.fakes import FakeEvent, FakeStream, replaced
from megatron_cg.tape.tape_backend import Pool, Tape
from tests.unit.ordering.trace import Operation, Trace, caller

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
    def __init__(self, device: "Device", number: int) -> None:
        super().__init__()
        self._trace, self._device = device.trace, device
        self._blocks: list[AbstractContextManager[None]] = []
        self.stream_id = self.cuda_stream = number

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        self._trace.add("wait", self.cuda_stream, event.number, at=caller())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event(self._trace)
        self._trace.add("record", event.number, self.cuda_stream, at=caller())
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Self:
        self._blocks.append(self._device._entered(self))
        self._blocks[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)


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
        self._trace.add("host_waits", self.number, at=caller())


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
        stream = Stream(self, len(self._all))
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
        by = Operation(self._running.cuda_stream, func.name(), caller())
        reads, writes = (self.trace.spans_of(tensors_in(values)) for values in (read, written))
        self.trace.add("launch", by, reads, writes)

    def _call(self, method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        options = [given for given in (*args, *kwargs.values()) if hasattr(given, "asyncOp")]
        if not all(given.asyncOp for given in options):
            with self.on_current_stream():
                return method(group, *args, **kwargs)
        own, before, event = self._stream_of(group), Event(self.trace), Event(self.trace)
        # What orders a collective has no place of its own.
        self.trace.add("record", before.number, self.current.cuda_stream)
        self.trace.add("wait", own.cuda_stream, before.number)
        with self._running_on(own):
            work = method(group, *args, **kwargs)
        self.trace.add("record", event.number, own.cuda_stream)
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
            self.trace.add("keep", number, stream.cuda_stream, at=caller())

        names: dict[str, Callable[..., Any]] = {
            "Stream": lambda *_, **__: self._new(f"the stream made at {caller()}"),
            "ExternalStream": lambda handle, *_, **__: self._all[handle],
            "Event": functools.partial(Event, self.trace),
            "stream": self._entered,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: self.trace.add("host_waits", at=caller()),
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


_NO_KERNEL = frozenset({"aten::set_", "aten::set_data", "aten::detach_"})
"""Operations that are declared as writes, but change only a tensor's view of memory."""


@cache
def _kind_of(func: torch._ops.OpOverload) -> str:
    """A look at an operation's schema costs more than a small kernel, so it is taken once."""
    if func.namespace == "c10d":
        return "collective"
    schema, writes = func._schema, bool(calls._places(func))
    makes_views = bool(schema.returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    if schema.name in _NO_KERNEL or (makes_views and not writes):
        return "no kernel"
    return "writes" if writes else "reads"


@cache
def _has_distributed(types: tuple[type, ...]) -> bool:
    return any(issubclass(kind, DTensor) for kind in types)


class Operations(TorchDispatchMode):
    """Records each ATen call, with the bytes that it reads and writes."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._device = device.trace, device
        self._replay = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and torch's wrapper costs as much as an operation.

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _has_distributed(types):
            return NotImplemented  # Its work is in operations on local tensors.
        kind = _kind_of(func)
        if not self._trace.on or kind == "no kernel":
            return func(*args, **kwargs)
        if kind == "collective":
            self._device.launch(func, args)
            return func(*args, **kwargs)
        given = tensors_in([args, *kwargs.values()] if kwargs else args)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        spans_of = self._trace.spans_of
        writes = spans_of(calls.written(func, args, kwargs)) if kind == "writes" else []
        reads = [span for span in spans_of(given) if span not in writes]
        result = func(*args, **kwargs)
        by = Operation(self._device.current.cuda_stream, f"{self._replay}{func}", caller())
        for value in tensors_in([result]):
            storage = value.untyped_storage()
            if storage._cdata not in known:
                is_new, spans = not self._trace.knows(storage), spans_of([value])
                if is_new and spans:
                    self._allocated(spans[0].storage, by)
                writes += spans
        if writes or reads:
            self._trace.add("launch", by, reads, writes)
        return result

    def _allocated(self, storage: int, by: Operation) -> None:
        self._trace.add("allocate", storage, by._replace(name=f"an allocation for {by.name}"))

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage was resized: its memory was released, and new memory was allocated."""
        if storage.nbytes() == before:
            return
        number = self._trace.number_of(storage)
        if before:
            self._trace.add("release", number)
        if storage.nbytes():
            stream = self._device.current.cuda_stream
            self._allocated(number, Operation(stream, "UntypedStorage.resize_", caller()))

    @contextmanager
    def replaying(self, label: str) -> Iterator[None]:
        before, self._replay = self._replay, f"the replay of the {label}: "
        try:
            with self._device.on_current_stream():
                yield
        finally:
            self._replay = before


def _unseen(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``make``, which gives a tape its tensors, past all modes: it runs no kernel."""

    def made(*args: Any) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return make(*args)

    return made


@contextmanager
def modelled_device() -> Iterator[Trace]:
    """Record what runs in the block, inside ``cpu_fakes``, while the trace is on.

    The device orders nothing by itself. Everything runs at once and in the order of the host, so no
    number changes.
    """
    trace = Trace()
    device = Device(trace)
    operations = Operations(device)
    resize, replay = torch.UntypedStorage.resize_, Tape.replay

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, nbytes)
        operations.resized(storage, before)
        return result

    def replayed(tape: Tape) -> None:
        with operations.replaying(tape.label):
            replay(tape)

    with ExitStack() as stack:
        stack.enter_context(device.modelled())
        for module, name in ((Pool, "tensor"), (tape_backend, "window")):
            stack.enter_context(replaced(module, name, _unseen(getattr(module, name))))
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resize_))
        stack.enter_context(replaced(Tape, "replay", replayed))
        stack.enter_context(operations)
        yield trace
