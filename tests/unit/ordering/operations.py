"""ATen operations as kernels on the current stream, and storages as the allocator sees them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.backends import calls
from megatron_cg.backends.calls import tensors_in
from megatron_cg.tape import tape_backend
from megatron_cg.tape.fakes import replaced
from megatron_cg.tape.tape_backend import Pool, Tape
from tests.unit.ordering.streams import Device
from tests.unit.ordering.trace import Allocate, Launch, Release, Span, Trace, caller

_NO_KERNEL = frozenset({"aten::set_", "aten::set_data", "aten::detach_"})
"""Operations that are declared as writes, but change only a tensor's view of memory."""


class _Facts(NamedTuple):
    """What an operation's schema says. A look at the schema itself costs more than a small kernel.

    ``has_no_kernel``: it makes views of its arguments, or is one of :data:`_NO_KERNEL`.
    """

    text: str
    is_collective: bool
    has_no_kernel: bool
    writes: bool


@cache
def _facts_of(func: torch._ops.OpOverload) -> _Facts:
    schema = func._schema
    writes = bool(calls._places(func))
    makes_views = bool(schema.returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    return _Facts(
        text=str(func),
        is_collective=func.namespace == "c10d",
        has_no_kernel=schema.name in _NO_KERNEL or (makes_views and not writes),
        writes=writes,
    )


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
        facts = _facts_of(func)
        if not self._trace.on or facts.has_no_kernel:
            return func(*args, **kwargs)
        if facts.is_collective:
            self._device.launch(func, args)
            return func(*args, **kwargs)
        given = tensors_in([args, *kwargs.values()] if kwargs else args)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        writes = self._spans(calls.written(func, args, kwargs)) if facts.writes else []
        reads = [span for span in self._spans(given) if span not in writes]
        result = func(*args, **kwargs)
        for value in tensors_in([result]):
            if value.untyped_storage()._cdata not in known:
                writes += self._allocated(value, f"{self._replay}{facts.text}")
        if writes or reads:
            stream, name = self._device.current.cuda_stream, f"{self._replay}{facts.text}"
            self._trace.add(Launch(stream, name, (*reads,), (*writes,), caller()))
        return result

    def _spans(self, tensors: list[torch.Tensor]) -> list[Span]:
        return [span for tensor in tensors if (span := self._trace.span_of(tensor)) is not None]

    def _allocated(self, tensor: torch.Tensor, made_by: str) -> list[Span]:
        is_new = not self._trace.knows(tensor.untyped_storage())
        spans = self._spans([tensor])
        if is_new and spans:
            stream = self._device.current.cuda_stream
            self._trace.add(Allocate(spans[0].storage, stream, made_by, caller()))
        return spans

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """A storage was resized: its memory was released, and new memory was allocated."""
        if storage.nbytes() == before:
            return
        number = self._trace.number_of(storage)
        if before:
            self._trace.add(Release(number))
        if storage.nbytes():
            stream = self._device.current.cuda_stream
            self._trace.add(Allocate(number, stream, "UntypedStorage.resize_", caller()))

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
