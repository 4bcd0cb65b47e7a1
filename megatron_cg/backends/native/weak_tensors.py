"""Tensors on memory of a graph's pool that they do not own.

Results that were released are still read by replays. A tensor that owned their memory would keep
the allocator from giving it to passes that are captured later. The pool itself lives as long as its
graphs, so the memory stays mapped.

Relied on: torch 2.11, ``torch._C._construct_storage_from_data_pointer``, with which Inductor's
CUDA graphs do the same (``torch/_inductor/cudagraph_trees.py``).
"""

from __future__ import annotations

import torch

from megatron_cg.upstream.symbols import Symbol

_STORAGE = Symbol(
    "torch",
    "torch._C:_construct_storage_from_data_pointer",
    "a storage that does not own its memory",
)
RELIES_ON = (_STORAGE,)


def without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it."""
    storage = tensor.untyped_storage()
    same = _STORAGE.find()(storage.data_ptr(), tensor.device, storage.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
