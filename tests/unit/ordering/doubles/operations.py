"""ATen operations as kernels on the current stream, and storages as the allocator sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.backends.host_reads import _reads as _reads_on_host
from megatron_cg.backends.tape.tape_recording import Tape, _leaves, _written
from megatron_cg.cpu.standins import replaced
from tests.unit.ordering.doubles.collectives import Collectives
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.doubles.streams import Streams
from tests.unit.ordering.sites import caller
from tests.unit.ordering.trace import Allocate, HostReads, Launch, Release, Span

_NO_KERNEL = frozenset({"aten::set_", "aten::set_data", "aten::detach_"})
"""Operations that are declared as writes, but change only a tensor's view of memory."""


class Operations(TorchDispatchMode):
    """Records each ATen call, with the bytes that it reads and writes."""

    def __init__(self, notes: Notes, streams: Streams, collectives: Collectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes, self._streams, self._collectives = notes, streams, collectives
        self._replay = ""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its work is in operations on local tensors.
        if not self._notes.on or func._schema.name in _NO_KERNEL:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            read, written = self._collectives.uses(func, args)
            self._collectives.launch(func.name(), self._spans(read), self._spans(written))
            return func(*args, **kwargs)
        given = [v for v in _leaves([args, *kwargs.values()]) if isinstance(v, torch.Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        reads_on_host = _reads_on_host(func, args, kwargs)
        writes = self._spans(_written(func, args, kwargs))
        reads = [span for span in self._spans(given) if span not in writes]
        result = func(*args, **kwargs)
        for value in _leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in known:
                writes += self._allocated(value, f"{self._replay}{func}")
        if writes or reads_on_host:
            stream = self._streams.current.cuda_stream
            launch = Launch(stream, f"{self._replay}{func}", (*reads,), (*writes,), caller())
            self._notes.add(launch)
            if reads_on_host:
                self._notes.add(HostReads(stream, caller()))
        return result

    def _spans(self, tensors: list[torch.Tensor]) -> list[Span]:
        return [span for tensor in tensors if (span := self._notes.span_of(tensor)) is not None]

    def _allocated(self, tensor: torch.Tensor, made_by: str) -> list[Span]:
        is_new = not self._notes.knows(tensor.untyped_storage())
        spans = self._spans([tensor])
        if is_new and spans:
            stream = self._streams.current.cuda_stream
            self._notes.add(Allocate(spans[0].storage, stream, made_by, caller()))
        return spans

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage was resized: its memory was released, and new memory was allocated."""
        if storage.nbytes() == before:
            return
        number = self._notes.number_of(storage)
        if before:
            self._notes.add(Release(number))
        if storage.nbytes():
            stream = self._streams.current.cuda_stream
            self._notes.add(Allocate(number, stream, "UntypedStorage.resize_", caller()))

    @contextmanager
    def replaying(self, label: str) -> Iterator[None]:
        """Operations in the block are those of a graph."""
        before, self._replay = self._replay, f"the replay of the {label}: "
        try:
            with self._collectives.on_current_stream():
                yield
        finally:
            self._replay = before


@contextmanager
def modelled_operations(operations: Operations) -> Iterator[None]:
    """Let ``operations`` see every call, resize and replay of this thread."""
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
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resize_))
        stack.enter_context(replaced(Tape, "replay", replayed))
        stack.enter_context(operations)
        yield
