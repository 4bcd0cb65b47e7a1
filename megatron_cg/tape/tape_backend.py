"""A backend without a GPU: it records ATen operations on a tape instead of a CUDA graph.

The driver does the rest (``backends/driver.py``), which follows TE's contract.

As with a graph no Python of the module runs at a replay, arguments are addresses and not Python
tensors, gradients of weights are tensors without an owner, memory is poisoned as soon as other
graphs of the pool might use it, and a read on the host is refused. A read of freed memory outside
of the pool is an error, while a GPU would return whatever is there now. Kernels, streams, speed,
and which tensors are on the host are not those of a GPU.

Note [Where a tensor is]
    On a CPU a tensor cannot show where it would be on a machine with a GPU. What a pass makes from
    numbers alone may be on the host, and each pass makes the same: it may be read. All other
    tensors are the device's. Copies from the host to the device are not refused: CUDA itself
    refuses them in a capture, or a kernel keeps the value of a zero-dimensional tensor, as a tape.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from megatron_cg.backends import calls, driver
from megatron_cg.backends.base import Backend, CaptureRequest
from megatron_cg.errors import CaptureError, HostSyncError, MegatronCGError, say
from megatron_cg.replay.borders import ranks_of_meshes
from megatron_cg.restore import write_back_all
from megatron_cg.upstream.patch import Undo, combined_undo, set_attribute, undone_after

#: Every byte of poisoned memory: NaN in each of torch's floating dtypes, -1 in the signed ones.
POISON = 0xFF
_empty = torch.empty
"""torch's own: what replaces it under the CPU fakes takes as long as a kernel here."""
_IN_PLACE = "{type:--fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail}"


class FreedStorageError(MegatronCGError):
    """A tape was about to use memory outside its pool that was freed or reallocated."""


@dataclass(frozen=True)
class Slot:
    """A strided window on one storage, recorded instead of a tensor argument.

    ``key`` names the storage in the pool that made the slot; ``offset``, ``size`` and ``stride``
    are in elements of ``dtype``. ``conjugated`` and ``negated`` tell torch's lazy views, which do
    not change the memory.
    """

    key: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False


@dataclass
class _Outside:
    """Memory that somebody else owns: a weak reference, and its address when it was recorded."""

    reference: driver.StorageReference
    address: int
    nbytes: int
    first_use: str


def window(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor."""
    return _empty(0, dtype=torch.uint8).set_(storage)


class Pool:
    """Storages created while the tapes of one capture were recorded, and storages they only use."""

    def __init__(self) -> None:
        self._own: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, _Outside] = {}
        self.lent: set[int] = set()
        """Storages to poison when the next tape of this pool runs, which may use the memory."""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._own

    def adopt(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        self._own.setdefault(key, storage)
        return key

    def slot(self, tensor: torch.Tensor, used_by: str) -> Slot:
        """Return the current window of ``tensor``; ``used_by`` names the op, for errors."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._own and key not in self._outside:
            # The weak reference keeps the key from being given to another storage.
            self._outside[key] = _Outside(
                driver.StorageReference(storage), storage.data_ptr(), storage.nbytes(), used_by
            )
        offset = int(tensor.storage_offset())
        window = offset, tuple(tensor.size()), tensor.stride()
        return Slot(key, tensor.dtype, *window, tensor.is_conj(), tensor.is_neg())

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return a new tensor on the slot's memory.

        Raises FreedStorageError if that memory is outside the pool and no longer there.
        """
        storage = self._own.get(slot.key)
        if storage is None:
            outside = self._outside[slot.key]
            storage = outside.reference.storage()
            if storage is None or storage.data_ptr() != outside.address:
                raise FreedStorageError(
                    f"the memory of {outside.nbytes} bytes that {outside.first_use} used when it "
                    "was recorded was freed since; a CUDA graph would read or write whatever lies "
                    "at the old address. Keep the buffer in place: with Megatron-FSDP "
                    f"{say(_IN_PLACE)}."
                )
        tensor = _empty(0, dtype=slot.dtype)
        tensor.set_(storage, slot.offset, slot.size, slot.stride)
        if slot.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if slot.negated else tensor

    def poison(self, keys: Iterable[int]) -> None:
        for key in keys:
            storage = self._own.get(key)
            if storage is not None and storage.nbytes():
                window(storage).fill_(POISON)


#: Torch tags them as data dependent, but only some of their arguments make them so.
_SOMETIMES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "repeat_interleave"}
)
#: Methods that read memory on the host, most without calling an ATen operation.
_METHODS = ("tolist", "numpy", "__array__", "cpu", "to")


def waits(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name, is_tagged = _name_and_tag(func)
    if name not in _SOMETIMES:
        return is_tagged
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and func._schema.overload_name != "self_int"
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "index":
        return masks
    # Torch turns a masked put of one value into masked_fill, which needs no count.
    return masks and args[2].numel() != 1


@cache
def _name_and_tag(func: torch._ops.OpOverload) -> tuple[str, bool]:
    """The name, and whether torch tags the operation as data dependent."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return func._schema.name.partition("::")[2], any(tag in func.tags for tag in tags)


@combined_undo
def methods_watched(read: Callable[[torch.Tensor, str], None]) -> Iterator[Undo]:
    """Call ``read`` before this thread reads a tensor by a method; returns the undo.

    Other threads may read tensors meanwhile, such as one that writes a checkpoint. On a CPU,
    autograd runs a backward pass in its caller's thread.
    """
    thread = threading.get_ident()

    def watching(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads = name != "to" or any(map(_is_host, (*args, kwargs.get("device"))))
            if reads and threading.get_ident() == thread:
                read(tensor, f"Tensor.{name}")
            return original(tensor, *args, **kwargs)

        return method

    for name in _METHODS:
        yield set_attribute(torch.Tensor, name, watching(name))


def _is_host(device: object) -> bool:
    """By its name alone: on a tape ``x.device`` is ``torch.device("cpu")`` of a device tensor."""
    return isinstance(device, str) and device.partition(":")[0] == "cpu"


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


@dataclass
class Tape(driver.Recording):
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
        flat = calls.leaves(operation.function(*args, **kwargs))
        _wait_for_collectives(operation.function, flat)
        for value, slot in zip(flat, operation.results, strict=True):
            if slot is not None:
                self.pool.tensor(slot).copy_(value)

    def _real(self, value: Any) -> Any:
        return _mapped(lambda one: self.pool.tensor(one) if type(one) is Slot else one, value)


def storage_keys(tensors: driver.Tensors) -> frozenset[int]:
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None)


_recorder: ContextVar["_Recorder | None"] = ContextVar("recorder", default=None)
"""What records in the current thread; its operations alone are recorded."""


def recorded_action(action: Callable[[], None]) -> None:
    """Run ``action`` now and, if a tape is being recorded, again at each of its replays.

    For host-side state that belongs to a CUDA graph, such as the generator of a random kernel
    (``CUDAGraph.register_generator_state``).
    """
    action()
    if (recorder := _recorder.get()) is not None:
        recorder.tape.entries.append(action)


def is_recording() -> bool:
    """Return whether a tape is being recorded, as ``torch.cuda.is_current_stream_capturing``."""
    return _recorder.get() is not None


def host_waits(what: str) -> None:
    """Note that the host waits for all work of a stream; raises HostSyncError in a capture."""
    if (recorder := _recorder.get()) is not None:
        raise recorder.error(what)


@contextmanager
def recording(pool: Pool, module: torch.nn.Module, label: str) -> Iterator[Tape]:
    """Record what runs in the block on a new tape over ``pool``.

    At the end, memory outside the pool that the block wrote is restored, since the capture of a
    CUDA graph runs no kernel. Raises HostSyncError inside the block if the host reads a tensor.
    """
    recorder = _Recorder(Tape(pool, label), module)
    outer = _recorder.set(recorder)
    try:
        with undone_after(methods_watched(recorder.read)), recorder:
            yield recorder.tape
    finally:
        _recorder.reset(outer)
        write_back_all(recorder.before.values())


class _Recorder(calls.CallMode):
    """Runs every ATen call below autograd and records it on the tape."""

    def __init__(self, tape: Tape, root: torch.nn.Module) -> None:
        super().__init__()
        self.tape, self._root = tape, root
        self._constants = ranks_of_meshes(root)
        """Storages whose values are made from numbers alone; see Note [Where a tensor is]."""
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The memory outside the pool that recording wrote, and what it held."""

    def run(self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            # The end of torch.tensor(...): its data is a constant, of which each replay has a copy.
            func, args = torch.ops.aten.clone.default, (args[0].clone(),)
            self._constants.add(self.tape.pool.adopt(args[0]))
        tensors = calls.tensors_in([args, *kwargs.values()])
        if any(map(_is_traced, tensors)):
            return func(*args, **kwargs)
        self._check_dense(func, tensors)
        collective = func.namespace == "c10d"
        writes = tensors if collective else calls.written(func, args, kwargs)
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
        flat = calls.leaves(result)
        made = calls.tensors_in(flat)
        if calls.has_wrapper(map(type, made)) or any(map(_is_traced, made)):
            return result  # It has no memory of its own.
        self._check_dense(func, made)
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
            self.tape.entries.append(_Operation(func, slots, named, results))
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
        place = calls.place_of(traceback.walk_stack(sys._getframe(1)), self._root)
        owner = place.owner if place is not None else type(self._root).__name__
        at = f" at {place.source}" if place is not None and place.source else ""
        return f"{owner} (captured as {self.tape.label}){at}"

    def _check_dense(self, func: torch._ops.OpOverload, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not driver.is_dense(tensor):
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
            if self.tape.pool.owns(storage) or storage._cdata in self.before:
                continue
            memory = window(storage)
            self.before[storage._cdata] = (memory, memory.clone())


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
    namespace = func.namespace
    if namespace == "_c10d_functional":
        # A replay copies the result before it comes to the recorded wait_tensor.
        for tensor in calls.tensors_in(flat):
            torch.ops._c10d_functional.wait_tensor(tensor)
    elif namespace == "c10d":
        for work in flat:
            if hasattr(work, "wait"):  # not a tensor
                work.wait()


class TapeBackend(Backend):
    name = "tape"
    device_type = "cpu"

    def capture(self, request: CaptureRequest) -> tuple[driver.GraphedModule, ...]:
        return driver.capture_modules(self.name, TapeRecorder, request)

    def synchronize(self) -> None:
        """Nothing to wait for: a replay has finished when its call returns."""


class TapeRecorder(driver.Recorder):
    """Records passes on tapes, and determines when the pool may reuse each storage."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._tapes: list[Tape] = []
        self._released: dict[int, int] = {}
        """By the id of a result: how many tapes there were when it was released."""

    @contextmanager
    def recording(self, module: nn.Module, label: str) -> Iterator[Tape]:
        with recording(self._pool, module, label) as tape:
            yield tape
        self._tapes.append(tape)

    def release(self, results: driver.Tensors) -> driver.Tensors:
        """The same tensors: the pool keeps all memory, and poisons what was released."""
        self._released.update((id(result), len(self._tapes)) for result in results)
        return results

    def settle(self, samples: Sequence[driver.Recorded]) -> None:
        """Determine when the pool may reuse each storage, and poison everything once.

        A storage of a sample that no caller reads after the sample's backward pass is dead then.
        A storage that was released later is dead before the next tape.
        """
        at = {id(tape): number for number, tape in enumerate(self._tapes)}
        never = len(self._tapes) + 1
        for item in samples:
            forward, backward = item.forward, item.backward
            assert isinstance(forward, Tape) and isinstance(backward, Tape)
            outputs = storage_keys(item.outputs)
            saved = forward.made & backward.used
            forward.dead_after = frozenset(forward.made - saved - outputs)
            end = at[id(backward)] + 1
            dies: dict[int, int] = {}
            for result in (*item.outputs, *item.grad_inputs):
                for key in storage_keys((result,)):  # It dies with the last of its tensors.
                    dies[key] = max(dies.get(key, 0), self._released.get(id(result), never))
            own = backward.made | saved | outputs
            backward.dead_after = frozenset(key for key in own if dies.get(key, end) <= end)
            for key, number in dies.items():
                if end < number < len(self._tapes):
                    later = self._tapes[number]
                    later.dead_before |= {key} - later.used
        for item in samples:
            assert isinstance(item.backward, Tape)
            of_inputs, of_weights = driver.parts(item)
            item.backward.of_weights = storage_keys(of_weights)
            # In a CUDA graph's memory each is without an owner.
            item.grad_inputs = (*of_inputs, *driver.without_owners(of_weights, self._pool.owns))
            for tape in (item.forward, item.backward):
                assert isinstance(tape, Tape)
                self._pool.poison(tape.made)
