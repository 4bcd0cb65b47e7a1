"""A tape: the ATen operations of one forward or backward, replayed without its Python."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.backends.aten import has_wrapper, leaves, run_inside, tensors_in, written
from megatron_cg.backends.driver.graphed import Recording, Tensors
from megatron_cg.backends.places import place_of
from megatron_cg.backends.tape.host_reads import methods_watched, waits
from megatron_cg.backends.tape.tape_memory import Pool, Slot, window
from megatron_cg.errors import CaptureError, HostSyncError
from megatron_cg.memory.storage import is_dense
from megatron_cg.replay.dtensors import ranks_of_meshes
from megatron_cg.restore import Restores, write_back

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
class Tape(Recording):
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
    of_weights: frozenset[int] = frozenset()
    """Storages of weights' gradients, which a replay may lend to its caller."""
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients were on when it was recorded. Some kernels of a CPU depend on it (torch
    2.11, ``mkldnn_rnn_layer``, for an LSTM)."""

    def replay(self) -> None:
        """Run the operations again, in order, on the memory that they were recorded on.

        Raises FreedStorageError if memory outside the pool is gone.
        """
        self.pool.poison(self.dead_before | self.pool.lent | self.made)
        self.pool.lent.clear()
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

    def finished(self, *, lends: bool) -> None:
        """Poison what is dead now; what is lent is poisoned when the next tape runs."""
        lent = self.of_weights if lends else frozenset()
        self.pool.poison(self.dead_after - lent)
        self.pool.lent |= self.dead_after & lent

    def reset(self) -> None:
        self.entries.clear()

    def _run(self, operation: _Operation) -> None:
        args = self._real(operation.args)
        kwargs = {name: self._real(value) for name, value in operation.kwargs.items()}
        flat = leaves(operation.function(*args, **kwargs))
        if operation.is_collective:
            _wait_for_collectives(operation.function, flat)
        for value, slot in zip(flat, operation.results, strict=True):
            if slot is not None:
                self.pool.tensor(slot).copy_(value)

    def _real(self, value: Any) -> Any:
        return _mapped(lambda one: self.pool.tensor(one) if type(one) is Slot else one, value)


def storage_keys(tensors: Tensors) -> frozenset[int]:
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None)


class _OfThread(threading.local):
    """What records in the current thread; its operations alone are recorded."""

    def __init__(self) -> None:
        self.recorders: list[_Recorder] = []


_here = _OfThread()


def recorded_action(action: Callable[[], None]) -> None:
    """Run ``action`` now and, if a tape is being recorded, again at each of its replays.

    For host-side state that belongs to a CUDA graph, such as the generator of a random kernel
    (``CUDAGraph.register_generator_state``).
    """
    action()
    if _here.recorders:
        _here.recorders[-1].tape.entries.append(action)


def is_recording() -> bool:
    """Return whether a tape is being recorded, as ``torch.cuda.is_current_stream_capturing``."""
    return bool(_here.recorders)


def host_waits(what: str) -> None:
    """Note that the host waits for all work of a stream; raises HostSyncError in a capture."""
    if _here.recorders:
        raise _here.recorders[-1].error(what)


@contextmanager
def recording(pool: Pool, module: torch.nn.Module, label: str) -> Iterator[Tape]:
    """Record what runs in the block on a new tape over ``pool``.

    At the end, memory outside the pool that the block wrote is restored, since the capture of a
    CUDA graph runs no kernel. Raises HostSyncError inside the block if the host reads a tensor.
    """
    recorder = _Recorder(Tape(pool, label), module)
    _here.recorders.append(recorder)
    try:
        with methods_watched(recorder.read), recorder:
            yield recorder.tape
    finally:
        _here.recorders.pop()
        recorder.put_back()


class _Recorder(TorchDispatchMode):
    """Runs every ATen call below autograd and records it on the tape."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, root: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self._root = tape, root
        self._constants = ranks_of_meshes(root)
        """Storages whose values are made from numbers alone; see Note [Where a tensor is]."""
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if has_wrapper(types):
            return NotImplemented  # Its own operations are recorded.
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return run_inside(self, func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            # The end of torch.tensor(...): its data is a constant, of which each replay has a copy.
            func, args = torch.ops.aten.clone.default, (args[0].clone(),)
            self._constants.add(self.tape.pool.adopt(args[0]))
        tensors = tensors_in([args, *kwargs.values()])
        if any(map(_is_traced, tensors)):
            return func(*args, **kwargs)
        self._check_dense(func, tensors)
        collective = func.namespace == "c10d"
        writes = tensors if collective else written(func, args, kwargs)
        constant = not collective and all(map(self._is_constant, tensors))
        if waits(func, args, kwargs) and not constant:
            raise self.error(str(func))

        def slot_for(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            slot = self.tape.pool.slot(value, f"{func} of {self.tape.label}")
            self.tape.used.add(slot.key)
            return slot

        # Slots first: the call may resize or set its arguments.
        slots = [_mapped(slot_for, one) for one in args]
        named = {name: _mapped(slot_for, one) for name, one in kwargs.items()}
        self._save_outside(writes)
        result = func(*args, **kwargs)
        flat = leaves(result)
        if has_wrapper([*map(type, tensors_in(flat))]) or any(map(_is_traced, tensors_in(flat))):
            return result  # It has no memory of its own.
        self._check_dense(func, tensors_in(flat))
        _wait_for_collectives(func, flat)
        inputs = {t.untyped_storage()._cdata for t in tensors}
        results = tuple(self._result_slot(value, inputs, func) for value in flat)
        if constant and torch.Tag.nondeterministic_seeded not in func.tags:
            self._constants.update(slot.key for slot in results if slot is not None)
        else:
            self._constants -= storage_keys(tuple(writes))
        if not writes and not any(slot is not None for slot in results):
            return result  # a view, or only host values: there is no kernel to run again
        if func._schema.name.partition("::")[2] not in _UNSET:
            functional = func.namespace == "_c10d_functional"
            operation = _Operation(func, slots, named, results, collective or functional)
            self.tape.entries.append(operation)
        return result

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._constants

    def read(self, tensor: torch.Tensor, what: str) -> None:
        """Raise HostSyncError if ``what`` reads memory of the device."""
        if not self._is_constant(tensor):
            raise self.error(what)

    def error(self, what: str) -> HostSyncError:
        """The error for ``what``, which waits, with its place."""
        return HostSyncError(f"{what} in {self._place()}")

    def _place(self) -> str:
        place = place_of(traceback.walk_stack(sys._getframe(1)), self._root)
        owner = place.owner if place is not None else type(self._root).__name__
        at = f" at {place.source}" if place is not None and place.source else ""
        return f"{owner} (captured as {self.tape.label}){at}"

    def _check_dense(self, func: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not is_dense(tensor):
                raise CaptureError(
                    f"{func} in {self._place()} uses a tensor that is not dense "
                    f"({tensor.layout}), and a tape records dense memory. Keep what is sparse "
                    "outside of the captured module, or leave the module out."
                )

    def _result_slot(
        self, value: Any, inputs: set[int], func: torch._ops.OpOverload
    ) -> Slot | None:
        """Return the slot of a new result, or None for a result that aliases an argument."""
        if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in inputs:
            return None
        self.tape.made.add(self.tape.pool.adopt(value))
        return self.tape.pool.slot(value, str(func))

    def _save_outside(self, writes: list[torch.Tensor]) -> None:
        for tensor in writes:
            storage = tensor.untyped_storage()
            if self.tape.pool.owns(storage) or storage._cdata in self._before:
                continue
            memory = window(storage)
            self._before[storage._cdata] = (memory, memory.clone())

    def put_back(self) -> None:
        """Restore the memory outside the pool that recording wrote."""
        with Restores() as stack:
            for memory, before in self._before.values():
                stack.restore("memory that a pass wrote to", write_back, memory, before)


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether it has no memory: it is fake or on the meta device, while something is traced."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.untyped_storage().device.type == "meta"


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An argument with each leaf changed; tuples become lists, which ATen accepts too."""
    if isinstance(value, list | tuple):
        return [_mapped(change, one) for one in value]
    return change(value)


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
