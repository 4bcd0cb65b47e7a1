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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cg.backends.host_reads import HostReads
from megatron_cg.tools.plan.pool import Block, Pool, round_up

_FACTORIES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that allocate memory but launch nothing."""

_FREE = frozenset({"detach", "lift_fresh", "alias", "_unsafe_view", "_reshape_alias", "set_"})
"""Operations that torch does not mark as views but that launch nothing."""


_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
_WAITS = frozenset({"wait_tensor", "barrier"})
_ByStorage = weakref.WeakKeyDictionary[torch.UntypedStorage, Block | None]


class Trace(TorchDispatchMode):
    """Follows every tensor that is created on the meta device in its block.

    Args:
        pool: allocates the bytes of each new storage.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool = pool
        self.reads: HostReads | None = None
        self.launches = 0
        """Kernels that the operations so far would have launched."""
        self.torch_gemms = 0
        """Those of them that are torch's own matrix products, with torch's own workspace."""
        self._blocks = _ByStorage()
        self._regions = 0
        self._deferred = _ByStorage()
        """Storages that were created in a region that is one kernel."""

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
        leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        made = [tensor for tensor in leaves if tensor.device.type == "meta"]
        for storage in (tensor.untyped_storage() for tensor in made):
            if storage not in self._blocks:
                self._note(storage)
        self.launches += _launches(func, name, bool(made))
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
                left, self._deferred = self._deferred, _ByStorage()
                for storage in left:
                    self._note(storage)

    def known(self, *tensors: torch.Tensor) -> None:
        """Treat the storages of these tensors as memory that existed before."""
        for tensor in tensors:
            self._blocks[tensor.untyped_storage()] = None

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """What the storages of ``tensors`` take in the pool, each counted once."""
        storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
        return sum(round_up(s.nbytes()) for s in storages.values() if self._blocks.get(s))

    def _note(self, storage: torch.UntypedStorage) -> None:
        if self._regions:
            self._deferred[storage] = None
            return
        block = self._blocks[storage] = self.pool.allocate(storage.nbytes())
        weakref.finalize(storage, self.pool.free, block).atexit = False


def _launches(func: Any, name: str, on_device: bool) -> bool:
    """Whether an operation launches a kernel; collectives do, whatever they return."""
    if func.namespace in _COLLECTIVES:
        return name not in _WAITS
    quiet = func.is_view or name in _FACTORIES or name in _FREE
    return bool(on_device and func.namespace == "aten" and not quiet)


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
        pool = _active[-1].pool
        for block in [pool.allocate(size) for size in sizes]:
            pool.free(block)
