"""Whether a piece of code called collectives, from the counters of the process groups.

It is an error in NCCL if a collective is in a graph on one rank and not on another: "that an
operation is captured is a collective property and must be uniform over all ranks" (NCCL user
guide, "Using NCCL with CUDA Graphs"). So capture must know which graphs contain collectives.

Note [Collectives of other threads]
    The counters belong to the process. A thread that saves a checkpoint on one rank while that rank
    captures would mark units there and nowhere else. So during a capture the methods of a process
    group note what other threads add to its counter, and :func:`collectives_so_far` takes it off.
    The capturing thread is known by a mark in torch's thread-local state. Autograd hands this
    state to its device threads for each backward pass, so the collectives of a backward pass belong
    to the thread that called it, wherever they run: on CUDA in a device thread, on the CPU in the
    same thread. ``torch/_inductor/cudagraph_trees.py`` finds its state in backward in this way.
    Functional collectives of another thread do not go through these methods and still count. At the
    end of a capture all ranks take the union of what they found (``Agreement.confirm``), so such a
    unit votes more often than it has to, on all ranks alike.

Relied on: torch 2.11 takes no reference to what ``_stash_obj_in_tls`` stores, and gives one back
when it is replaced. So only an object that never ends may be stored, such as True.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from megatron_cg.upstream.patch import all_of, put_over, undone_after
from megatron_cg.upstream.symbols import Symbol

_METHODS = (  # Of torch 2.11; one that is missing counts for the capturing thread.
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "alltoall",
    "barrier",
)
_GROUP = Symbol(
    "torch",
    "torch.distributed:ProcessGroup",
    "a group whose methods are its collectives, and which counts them",
    attributes=("_get_sequence_number_for_group", "allreduce"),
)
_PUT, _GET, _HAS = (
    Symbol("torch", f"torch._C:{name}", "state of a thread that autograd hands to its own threads")
    for name in ("_stash_obj_in_tls", "_get_obj_in_tls", "_is_key_in_tls")
)
RELIES_ON = (
    _GROUP,
    Symbol(
        "torch",
        "torch.distributed.distributed_c10d:_world",
        "all groups of this process",
        attributes=("pg_map",),
    ),
    _PUT,
    _GET,
    _HAS,
)

_KEY = "megatron_cg captures"


class _Count:
    """The counter of one group without what other threads add to it."""

    def __init__(self, group: Any) -> None:
        self._group, self._own, self._foreign = group, _counted(group), 0
        self._in_flight, self._since = 0, 0

    def foreign_begins(self) -> None:
        """Another thread calls a collective."""
        if not self._in_flight:
            self._since = _counted(self._group)
        self._in_flight += 1

    def foreign_returns(self) -> None:
        """That call has returned."""
        self._in_flight -= 1
        if not self._in_flight:
            self._foreign += _counted(self._group) - self._since

    def own(self) -> int:
        """What is left; during a call in flight, which may count or not, what was left before."""
        if not self._in_flight:
            self._own = max(self._own, _counted(self._group) - self._foreign)
        return self._own


_counts: dict[Any, _Count] = {}
"""Of groups that other threads use, during a capture."""
_called = 0
"""How often the methods of groups were called by threads that capture."""
_lock = threading.Lock()


def collectives_so_far() -> int:
    """A number that grows with each collective that this process calls, of whatever group.

    Point-to-point operations are not counted. In :func:`without_other_threads`, neither are
    collectives of other threads.
    """
    if not dist.is_initialized():
        return 0
    with _lock:
        groups = list(dist.distributed_c10d._world.pg_map)
        of_groups = (_counts[one].own() if one in _counts else _counted(one) for one in groups)
        return _called + sum(of_groups)


@contextmanager
def without_other_threads() -> Iterator[None]:
    """Inside the block, collectives of other threads are not counted; see the note above."""
    put, get, has, group = _PUT.find(), _GET.find(), _HAS.find(), _GROUP.find()

    def is_own() -> bool:
        return bool(has(_KEY) and get(_KEY))

    put(_KEY, True)
    methods = {name: getattr(group, name) for name in _METHODS if hasattr(group, name)}
    undo = all_of(put_over(group, name, _noting(old, is_own)) for name, old in methods.items())
    with undone_after(lambda: put(_KEY, False)), undone_after(_counts.clear), undone_after(undo):
        yield


def _noting(method: Callable[..., Any], is_own: Callable[[], bool]) -> Callable[..., Any]:
    """A group's ``method`` that notes which thread calls it."""

    def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
        global _called
        if is_own():
            _called += 1
            return method(group, *args, **kwargs)
        with _lock:
            if group not in _counts:
                _counts[group] = _Count(group)
            count = _counts[group]
            count.foreign_begins()
        try:
            return method(group, *args, **kwargs)
        finally:
            with _lock:
                count.foreign_returns()

    return noting


def _counted(group: Any) -> int:
    # This rank is not in the group, or the backend keeps no count.
    with suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    return 0
