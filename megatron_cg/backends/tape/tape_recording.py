"""A tape: the ATen operations of one forward or backward, replayed without its Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.backends.aten import written
from megatron_cg.backends.driver.recorder import Tensors
from megatron_cg.backends.host_reads import HostReads
from megatron_cg.backends.tape.tape_memory import Pool, Slot, window
from megatron_cg.errors import CaptureError
from megatron_cg.memory.storage import is_dense

#: ATen factories that do not initialise their result: a replay has nothing to do for them.
_UNSET = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True)
class _Operation:
    """One ATen call: arguments with slots for tensors, and the slots of its new results."""

    function: torch._ops.OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    #: Per flattened result: the slot to copy it into, or None if nothing is copied.
    results: tuple[Slot | None, ...]
    is_collective: bool


@dataclass
class Tape:
    """Recorded operations on one pool.

    ``made`` holds the keys of the storages that it creates, ``used`` of all that it uses.
    ``dead_before`` and ``dead_after`` are storages that must not be read once a replay of this tape
    begins, or has ended.
    """

    pool: Pool
    label: str
    entries: list[_Operation | Callable[[], None]] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    dead_before: frozenset[int] = frozenset()
    dead_after: frozenset[int] = frozenset()
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients were on when it was recorded. Some kernels of a CPU depend on it (torch
    2.11, ``mkldnn_rnn_layer``, for an LSTM)."""

    def replay(self) -> None:
        """Run the operations again, in order, on the memory that they were recorded on.

        Raises FreedStorageError if memory outside the pool is gone.
        """
        self.pool.poison(self.dead_before)
        self.pool.poison_borrowed()
        self.pool.poison(self.made)
        with (
            torch.set_grad_enabled(self.grad_mode),
            # The operations were recorded behind the casts of autocast.
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            for entry in self.entries:
                if isinstance(entry, _Operation):
                    self._run(entry)
                else:
                    entry()

    def finished(self, lent: Tensors) -> None:
        """Poison what is dead now; what was lent is poisoned when the next tape runs."""
        borrowed = storage_keys(lent)
        self.pool.poison(self.dead_after - borrowed)
        self.pool.poison_before_next_replay(self.dead_after & borrowed)

    def reset(self) -> None:
        """Nothing to release but the operations."""
        self.entries.clear()

    def _run(self, operation: _Operation) -> None:
        args = self._real(operation.args)
        kwargs = {name: self._real(value) for name, value in operation.kwargs.items()}
        flat = _leaves(operation.function(*args, **kwargs))
        if operation.is_collective:
            _wait_for_collectives(operation.function, flat)
        for value, slot in zip(flat, operation.results, strict=True):
            if slot is not None:
                self.pool.tensor(slot).copy_(value)

    def _real(self, value: Any) -> Any:
        """A recorded argument with tensors for its slots; it has lists, and no tuples."""
        kind = type(value)
        if kind is Slot:
            return self.pool.tensor(value)
        return [self._real(one) for one in value] if kind is list else value


def storage_keys(tensors: Tensors) -> set[int]:
    """The keys of the storages of these tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


class _OfThread(threading.local):
    """The tapes that the current thread records; its operations alone are recorded."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []


_here = _OfThread()


def recorded_action(action: Callable[[], None]) -> None:
    """Run ``action`` now and, if a tape is being recorded, again at each of its replays.

    For host-side state that belongs to a CUDA graph, such as the generator of a random kernel
    (``CUDAGraph.register_generator_state``).
    """
    action()
    if _here.tapes:
        _here.tapes[-1].entries.append(action)


def is_recording() -> bool:
    """Return whether a tape is being recorded, as ``torch.cuda.is_current_stream_capturing``."""
    return bool(_here.tapes)


@contextmanager
def recording(pool: Pool, module: torch.nn.Module, label: str) -> Iterator[Tape]:
    """Record what runs in the block on a new tape over ``pool``.

    At the end, memory outside the pool that the block wrote is restored, since the capture of a
    CUDA graph runs no kernel. Raises HostSyncError inside the block if the host reads a device
    tensor or copies a host tensor to the device.
    """
    tape = Tape(pool, label)
    reads = HostReads(module, label, pool.host)
    recorder = _Recorder(tape, reads)
    _here.tapes.append(tape)
    try:
        with reads.refused(), recorder:
            yield tape
    finally:
        _here.tapes.pop()
        recorder.put_back()


class _Recorder(TorchDispatchMode):
    """Runs every ATen call below autograd and records it on the tape."""

    def __init__(self, tape: Tape, reads: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._reads = reads
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = _leaves([args, *kwargs.values()])
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        self._check_dense(func, tensors)
        collective = func.namespace == "c10d"
        writes = tensors if collective else written(func, args, kwargs)
        if self._reads.is_of_host(func, tensors, writes):
            result = func(*args, **kwargs)
            self._reads.add(_leaves(result))
            return result
        self._reads.check(func, args, kwargs)
        # Slots first: the call may resize or set its arguments.
        slots = _mapped(self._slot_for(func), args, kwargs)
        self._save_outside(writes)
        result = func(*args, **kwargs)
        flat = _leaves(result)
        self._check_dense(func, flat)
        _wait_for_collectives(func, flat)
        inputs = {t.untyped_storage()._cdata for t in tensors}
        results = tuple(self._result_slot(value, inputs, func) for value in flat)
        if not writes and not any(slot is not None for slot in results):
            return result  # a view, or only host values: there is no kernel to run again
        if func._schema.name.partition("::")[2] not in _UNSET:
            functional = func.namespace == "_c10d_functional"
            operation = _Operation(func, *slots, results, collective or functional)
            self._tape.entries.append(operation)
        return result

    def _check_dense(self, func: torch._ops.OpOverload, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and not is_dense(value):
                raise CaptureError(
                    f"{func} in {self._reads.place()} uses a tensor that is not dense "
                    f"({value.layout}), and a tape records dense memory. Keep what is sparse "
                    "outside of the captured module, or leave the module out."
                )

    def _slot_for(self, func: torch._ops.OpOverload) -> Callable[[Any], Any]:
        def slot_for(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if self._reads.has(value):
                # A constant: the kernel keeps its current value, and nothing else owns it.
                value = value.clone()
                self._tape.pool.adopt(value)
            slot = self._tape.pool.slot(value, f"{func} of {self._tape.label}")
            self._tape.used.add(slot.key)
            return slot

        return slot_for

    def _result_slot(
        self, value: Any, inputs: set[int], func: torch._ops.OpOverload
    ) -> Slot | None:
        """Return the slot of a new result, or None for a result that aliases an argument."""
        if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in inputs:
            return None
        self._tape.made.add(self._tape.pool.adopt(value))
        return self._tape.pool.slot(value, str(func))

    def _save_outside(self, writes: list[torch.Tensor]) -> None:
        for tensor in writes:
            storage = tensor.untyped_storage()
            if self._tape.pool.owns(storage._cdata) or storage._cdata in self._before:
                continue
            memory = window(storage)
            self._before[storage._cdata] = (memory, memory.clone())

    def put_back(self) -> None:
        """Restore the memory outside the pool that recording wrote."""
        for memory, before in self._before.values():
            memory.copy_(before)


def _leaves(value: Any) -> list[Any]:
    """The leaves of lists and tuples; an ATen call nests nothing else.

    torch's general tree functions take several times as long, for each argument.
    """
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]


def _mapped(
    change: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with each leaf changed; tuples become lists, which ATen accepts too."""

    def one(value: Any) -> Any:
        return [one(inner) for inner in value] if isinstance(value, list | tuple) else change(value)

    return [one(value) for value in args], {name: one(value) for name, value in kwargs.items()}


def _wait_for_collectives(func: torch._ops.OpOverload, flat: list[Any]) -> None:
    """Finish a collective before later operations read its result, as stream order would."""
    if func.namespace == "_c10d_functional":
        # A replay copies the result before it comes to the recorded wait_tensor.
        for value in flat:
            if isinstance(value, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(value)
    if func.namespace != "c10d":
        return
    for value in flat:
        if hasattr(value, "wait"):  # the collective's work, not a tensor
            value.wait()
