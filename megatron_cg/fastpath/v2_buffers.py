"""Megatron-FSDP v2's bookkeeping: what it computes anew at each call, kept while graphs live.

Note [A layout is a value]
    v2 makes a buffer for the gradients of each group in each microbatch, and one for its weights in
    each step. For each it lays out the tensors again and checks the layout, for which it defines a
    class (``GlobalLayout.__post_init__``). That is half of the time of its hooks. A layout depends
    only on the shapes and the number of shards, and it is frozen, so buffers can share it.

Note [Kept as long as the memory]
    A group gathers weights into one buffer and reduces gradients into another one, and takes a view
    or a DTensor of each parameter from it in each microbatch. Here each is made once. Only the
    group's own two buffers keep them: a buffer that takes the place of one makes its own. A buffer
    whose memory is replaced makes new ones; that is seen by the storage, as in ``bucketing.py``.
    With replicas over which gradients are reduced at the last microbatch, v2 makes a new buffer of
    gradients in each step. There is nothing to keep then, and the old one must be freed.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import finalize

import torch

from megatron_cg.fsdp.roles import fsdp_v2
from megatron_cg.upstream.patch import Undo, all_of, put_over

_LAYOUT, _BUFFER = "layout:GlobalLayout", "dbuffer:DBuffer"
REPLACES_LAYOUTS = (
    *fsdp_v2(f"{_LAYOUT}.build", "lays out a buffer", fingerprints=("65d667e7adb9f2ac",)),
    *fsdp_v2(f"{_LAYOUT}.__post_init__", "checks it", fingerprints=("dcfbd2dbdc608cbe",)),
)
REPLACES_VIEWS = (
    *fsdp_v2(f"{_BUFFER}.get_local_tensor", "a view", fingerprints=("15cd9ae6b2603518",)),
    *fsdp_v2(
        f"{_BUFFER}.get_dtensor",
        "a view as a DTensor",
        fingerprints=("64b72abcf05a58be", "f26bcecbad026ce9"),
    ),
)
RELIES_ON = (
    *REPLACES_LAYOUTS,
    *REPLACES_VIEWS,
    *fsdp_v2(
        "parameter_group:FsdpParameterGroup",
        "parameters that are gathered together",
        *("main_weight", "main_grad", "_main_grad_placements|_accumulation_placements"),
    ),
)


def keep_layouts(group: Any) -> Undo:
    """See Note [A layout is a value]. It is undone when ``group`` is gone, at the latest."""
    kind: Any = type(group._unsharded_model_weight.layout)
    laid_out = cache(kind.build)

    def build(shapes: Iterable[Iterable[int]], dp_size: int) -> Any:
        return laid_out(tuple(map(torch.Size, shapes)), dp_size)

    return finalize(group, put_over(kind, "build", build))


def keep_views(groups: Iterable[Any]) -> Undo:
    """See Note [Kept as long as the memory]; returns the undo."""
    return all_of(undo for group in groups for undo in _of_group(group))


def _of_group(group: Any) -> Iterator[Undo]:
    yield _kept(group._unsharded_model_weight, "get_local_tensor")
    gradients = group.main_grad
    if gradients is None:
        return
    of_microbatch = getattr(group, "_main_grad_placements", None)
    if of_microbatch is None:
        of_microbatch = group._accumulation_placements
    if tuple(of_microbatch) == gradients.placements == group.main_weight.placements:
        yield _kept(gradients, "get_dtensor")


def _kept(buffer: Any, method: str) -> Undo:
    original = getattr(buffer, method)
    found: dict[int, Any] = {}
    place: tuple[int, int] | None = None

    def of_index(index: int) -> Any:
        nonlocal place
        memory = buffer.local_buffer
        now = (memory.untyped_storage()._cdata, memory.storage_offset())
        if now != place:
            found.clear()
            place = now
        if index not in found:
            found[index] = original(index)
        return found[index]

    return put_over(buffer, method, of_index)
