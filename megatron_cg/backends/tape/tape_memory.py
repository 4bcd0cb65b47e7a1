"""Memory as a tape sees it: addresses, a pool of its own, and memory outside of the pool.

A CUDA graph reads and writes addresses. It does not follow a Python tensor after its ``.data`` has
moved, and the memory of its pool belongs to the graph of that pool that ran last. :class:`Slot` and
:class:`Pool` give a tape the same two properties on a CPU, with one difference: a read of freed
memory outside the pool is an error here, while a GPU would return whatever is there now.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.memory.storage import StorageReference

#: Every byte of poisoned memory: NaN in each of torch's floating dtypes, -1 in the signed ones.
POISON = 0xFF
_empty = torch.empty
"""torch's own: what replaces it under the CPU fakes takes as long as a kernel here."""


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

    reference: StorageReference
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
                StorageReference(storage), storage.data_ptr(), storage.nbytes(), used_by
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
            storage = self._outside_storage(slot.key)
        tensor = _empty(0, dtype=slot.dtype)
        tensor.set_(storage, slot.offset, slot.size, slot.stride)
        if slot.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if slot.negated else tensor

    def _outside_storage(self, key: int) -> torch.UntypedStorage:
        outside = self._outside[key]
        storage = outside.reference.storage()
        if storage is not None and storage.data_ptr() == outside.address:
            return storage
        raise FreedStorageError(
            f"the memory of {outside.nbytes} bytes that {outside.first_use} used when it was "
            "recorded was freed since; a CUDA graph would read or write whatever lies at the old "
            "address. Keep the buffer in place: with Megatron-FSDP type --fsdp-double-buffer "
            "--fsdp-db-use-persist-buf-on-alloc-fail."
        )

    def poison(self, keys: Iterable[int]) -> None:
        for key in keys:
            storage = self._own.get(key)
            if storage is not None and storage.nbytes():
                window(storage).fill_(POISON)
