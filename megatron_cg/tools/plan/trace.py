"""Traces what a run on the meta device would allocate and launch, operation by operation.

Tensors on the meta device have a shape, a dtype and a storage, but no memory. Autograd keeps and
frees them as on a GPU, so the lifetime of each storage is the lifetime of the memory.

Note [A storage's life]
    torch keeps the Python object of a storage alive as long as the storage itself (torch 2.11,
    ``StorageMethods.cpp``). So a weak reference to it dies exactly when the memory would be freed,
    even if only autograd's saved tensors hold the storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cg.backends.host_reads import HostReads

_FACTORIES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that allocate memory but launch nothing."""

_FREE = frozenset({"detach", "lift_fresh", "alias", "_unsafe_view", "_reshape_alias", "set_"})
"""Operations that torch does not mark as views but that launch nothing."""


_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
_WAITS = frozenset({"wait_tensor", "barrier"})


def _launches(func: Any, name: str, on_device: bool) -> bool:
    """Whether an operation launches a kernel; collectives do, whatever they return."""
    if func.namespace in _COLLECTIVES:
        return name not in _WAITS
    quiet = func.is_view or name in _FACTORIES or name in _FREE
    return bool(on_device and func.namespace == "aten" and not quiet)


class Memory(Protocol):
    """Allocates and frees bytes."""

    def allocate(self, size: int) -> object:
        """Allocate ``size`` bytes; returns the argument for :meth:`free`."""

    def free(self, block: Any) -> None:
        """Free a block."""


class Trace(TorchDispatchMode):
    """Follows every tensor that is created on the meta device in its block.

    Args:
        memory: allocates the bytes of each new storage.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: Memory = memory
        self.reads: HostReads | None = None
        self.launches = 0
        """Kernels that the operations so far would have launched."""
        self.torch_gemms = 0
        """Those of them that are torch's own matrix products, with torch's own workspace."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._taken: set[int] = set()
        self._regions = 0
        self._deferred: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and record its results. Copies to the host return zeros."""
        kwargs = kwargs or {}
        if self.reads is not None:
            self.reads.check(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            source = args[0]
            if source.device.type == "meta":
                self.launches += 1
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        on_device = [tensor for tensor in made if tensor.device.type == "meta"]
        for tensor in on_device:
            self._note(tensor)
        self.launches += _launches(func, name, bool(on_device))
        self.torch_gemms += func.namespace == "aten" and name in _GEMMS
        return result

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Treat the block as one kernel: storages that do not outlive it are never allocated."""
        launches, gemms = self.launches, self.torch_gemms
        self._regions += 1
        try:
            yield
        finally:
            self._regions -= 1
            self.launches, self.torch_gemms = launches + 1, gemms
            if not self._regions:
                left, self._deferred = self._deferred, {}
                for reference in left.values():
                    storage = reference()
                    if storage is not None:
                        self._take(storage)

    def took(self, key: int) -> bool:
        """Whether the storage with that ``id`` was created under this trace and still exists."""
        return key in self._taken

    def known(self, *tensors: torch.Tensor) -> None:
        """Treat the storages of these tensors as memory that existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[id(storage)] = weakref.ref(storage, self._forget(id(storage)))

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._deferred:
            return
        if self._regions:
            self._deferred[key] = weakref.ref(storage, lambda _gone: self._deferred.pop(key, None))
            return
        self._take(storage)

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        block, memory = self.memory.allocate(storage.nbytes()), self.memory

        def freed(_reference: Any) -> None:
            del self._alive[key]
            self._taken.discard(key)
            memory.free(block)

        self._alive[key] = weakref.ref(storage, freed)
        self._taken.add(key)

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(_reference: Any) -> None:
            del self._alive[key]

        return forget


_active: list[Trace] = []


@contextmanager
def tracing(trace: Trace, reads: HostReads | None = None) -> Iterator[None]:
    """Follow operations with ``trace`` and connect :func:`launched` to it.

    Given ``reads``, raises HostSyncError in the block where the host would read device memory.
    """
    _active.append(trace)
    trace.reads = reads
    try:
        with trace, reads.refused() if reads is not None else nullcontext():
            yield
    finally:
        trace.reads = None
        _active.pop()


def launched(kernels: int) -> None:
    """Count the kernels that the original of a fake would have launched."""
    if _active:
        _active[-1].launches += kernels


def compiled(function: Any = None, **_settings: Any) -> Any:
    """Replaces ``torch.compile``: returns the function unchanged, traced as one kernel."""
    if function is None:
        return compiled

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _active:
            return function(*args, **kwargs)
        with _active[-1].one_kernel():
            return function(*args, **kwargs)

    return run


def scratch(*sizes: int) -> None:
    """Allocate and free these sizes at once, as an operation with workspaces does."""
    if _active:
        memory = _active[-1].memory
        for block in [memory.allocate(size) for size in sizes]:
            memory.free(block)
