"""Collectives as torch 2.11's ProcessGroupNCCL puts them on streams, run by gloo.

An asynchronous one runs on a stream of its communicator, after what is on the current stream at the
call; a stream that needs its result waits for the work. One that is not asynchronous
(``opts.asyncOp`` false) runs on the current stream itself, and there is nothing to wait for.
Collectives of one communicator on two streams are not taken to be in order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Work

from megatron_cg.tools.cpu.fakes import replaced
from tests.unit.ordering.doubles.streams import Event, Stream, Streams
from tests.unit.ordering.sites import caller
from tests.unit.ordering.trace import Await, AwaitStream, Launch, Record, Span

#: Methods of torch 2.11's ProcessGroup that return a Work.
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
#: ATen names of those whose first argument is written and second read; others do both with all.
_FROM_SECOND_TO_FIRST = frozenset(
    {
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
    }
)


class Collectives:
    """Which stream a collective runs on, and what waits for it."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._of_group: dict[str, Stream] = {}
        self._of_work: weakref.WeakKeyDictionary[Any, Event] = weakref.WeakKeyDictionary()
        self._running: Stream | None = None
        """What a collective runs on, while a method of a process group is called."""

    def uses(
        self, func: torch._ops.OpOverload, args: Sequence[Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that a collective reads, and those that it writes."""
        if func._schema.name.partition("::")[2] in _FROM_SECOND_TO_FIRST:
            return tensors_in([args[1]]), tensors_in([args[0]])
        return tensors_in(args), tensors_in(args)

    def launch(self, name: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """Its kernel.

        Raises NotImplementedError where it is not known whether it is asynchronous.
        """
        if self._running is None:
            raise NotImplementedError(f"{name} comes from none of the modelled methods")
        stream = self._running
        entry = Launch(stream.cuda_stream, name, tuple(reads), tuple(writes), caller())
        self.streams.notes.add(entry)

    def call(self, method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a process group."""
        options = [one for one in (*args, *kwargs.values()) if hasattr(one, "asyncOp")]
        if not all(one.asyncOp for one in options):
            with self.on_current_stream():
                return method(group, *args, **kwargs)
        current, own = self.streams.current, self._stream_of(group)
        notes, event = self.streams.notes, self.streams.event()
        notes.add(AwaitStream(own.cuda_stream, current.cuda_stream))
        with self._running_on(own):
            work = method(group, *args, **kwargs)
        notes.add(Record(event.number, own.cuda_stream))
        if work is not None:
            self._of_work[work] = event
        return work

    def on_current_stream(self) -> AbstractContextManager[None]:
        """Collectives in the block run on the current stream, as those of a graph."""
        return self._running_on(self.streams.current)

    @contextmanager
    def _running_on(self, stream: Stream) -> Iterator[None]:
        before, self._running = self._running, stream
        try:
            yield
        finally:
            self._running = before

    def wait(self, work: Any) -> None:
        """The current stream waits for ``work``."""
        event = self._of_work.get(work)
        if event is not None:
            current = self.streams.current.cuda_stream
            self.streams.notes.add(Await(current, event.number, caller()))

    def _stream_of(self, group: Any) -> Stream:
        if group.group_name not in self._of_group:
            name = f"the stream of group {group.group_name} ({group.group_desc})"
            self._of_group[group.group_name] = self.streams.new(name)
        return self._of_group[group.group_name]


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in the lists and tuples of an ATen call."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


@contextmanager
def modelled_collectives(collectives: Collectives) -> Iterator[None]:
    """Let ``collectives`` see the calls of process groups, and the works that are waited for."""
    original_wait = Work.wait

    def wait(work: Any, *args: Any) -> Any:
        with collectives.streams.notes.paused():
            done = original_wait(work, *args)  # gloo makes copies here that NCCL does not need.
        collectives.wait(work)
        return done

    with ExitStack() as stack:
        for name in _METHODS:
            call = functools.partial(collectives.call, getattr(ProcessGroup, name))
            stack.enter_context(replaced(ProcessGroup, name, _method(call)))
        stack.enter_context(replaced(Work, "wait", wait))
        yield


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        return call(group, *args, **kwargs)

    return method
