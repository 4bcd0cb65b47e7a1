"""A weak reference to a storage that cannot be copied.

torch's own holds one count of the storage in a plain number. A copy by value, as
``copy.deepcopy`` makes it of whatever object it comes to, gives that count back a second time, and
the heap is corrupt: the process dies later, somewhere else, in ``malloc``.

Relied on: torch 2.11, ``torch.multiprocessing.reductions.StorageWeakRef`` and
``torch.UntypedStorage._new_with_weak_ptr``, which gives None once the last owner has let go.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageReference:
    """Refers to ``storage`` and does not keep its memory; its address is given to no other."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None where nobody holds it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._weak.cdata
        )
        return found

    def expired(self) -> bool:
        """Whether nobody holds the storage any more."""
        return bool(self._weak.expired())

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a reference to the memory of a CUDA graph, or of a tape, cannot be copied or pickled. "
            "Copy the module: its copy has no graphs. Or close the graphs first."
        )
