"""Storages: references that cannot be copied, and tensors without an owner.

torch's own weak reference holds one reference count of the storage, as a plain number.
``copy.deepcopy`` copies that number, and the copy releases the same count a second time. The heap
is then corrupt: the process crashes later, somewhere else, in ``malloc``.

Relied on: torch 2.11, ``torch.multiprocessing.reductions.StorageWeakRef`` and
``torch.UntypedStorage._new_with_weak_ptr``, which returns None once the last owner is gone.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_cg.upstream.symbols import Symbol

_STORAGE = Symbol(
    "torch._C:_construct_storage_from_data_pointer", "a storage that does not own its memory"
)
RELIES_ON = (_STORAGE,)


class StorageReference:
    """Refers to ``storage`` without keeping its memory; no other storage gets its ``_cdata``."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it no longer has an owner."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._weak.cdata
        )
        return found

    def expired(self) -> bool:
        return bool(self._weak.expired())

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a reference to the memory of a CUDA graph, or of a tape, cannot be copied or pickled. "
            "Copy the module before the capture, or close the graphs first."
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` lie in one block of memory, by its strides."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def without_owners(
    tensors: Iterable[torch.Tensor | None], is_in_pool: Callable[[torch.UntypedStorage], bool]
) -> tuple[torch.Tensor | None, ...]:
    """Tensors on the same memory, each with a storage of its own that does not keep the memory.

    One whose storage is elsewhere stays. So does one of a subclass, or a lazy conjugate: its memory
    does not tell the values.
    """

    def without_owner(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        if not is_in_pool(storage):
            return tensor
        same = _STORAGE.find()(storage.data_ptr(), tensor.device, storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())

    return tuple(None if tensor is None else without_owner(tensor) for tensor in tensors)
