"""Slots in the memory of the other GPUs of a host, to which a rank writes its rows directly.

Note [No padding on the way]
    An all-to-all of whole slots sends their padding too: with *R* ranks, *R* times the rows on
    average. Here a kernel writes only the rows. It reads the counts on the device, so a graph can
    hold it.

Note [Two barriers]
    A rank may write to a slot only after its owner has read what was written there before, and the
    owner may read only after the write. So a barrier comes before the writes, and another one after
    them. They are kernels that wait for signals of the other GPUs. All ranks must run each of them,
    as with a collective. The graph is known to contain collectives by the gather of token counts,
    which Megatron's dispatcher runs for each exchange.
    Outside of graphs a barrier waits :data:`LIMIT` at most. Torch then prints which rank waited for
    which, and the GPU is in an error state. In a graph there is no limit: NCCL's watchdog limits
    the gather before it, and a replay may wait for a rank that writes a checkpoint.

Note [Memory outside of torch's allocator]
    Other GPUs map the memory, so torch's caching allocator does not have it, and its statistics
    do not show it. All layers of a group share it, because an exchange reads its rows out of it
    before the next one begins.

Note [How long it lives]
    Graphs address the memory and do not hold it. Deleted graphs leave it to the next capture, and
    a capture frees what no graphs address: torch loses some bytes with each memory that it frees
    (torch 2.11, ``CUDASymmetricMemory.cu``, ``CUDAPeerAllocInfo``).

Note [Left to the driver]
    To free the memory, torch waits for the GPU: without end if a barrier waits for a rank that is
    gone. After a CUDA error torch ends the process there (``~AllocationRef``). So from its first
    use until its graphs are closed, a reference that nobody owns keeps the memory, also when the
    process ends. ``integrations/teardown.py`` leaves graphs to the driver likewise.
"""

import ctypes
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_cg.errors import CaptureError
from megatron_cg.moe.slots import Collective, Places
from megatron_cg.upstream.symbols import Symbol, changed

_CANNOT = "the {} expert-parallel ranks cannot map each other's GPU memory: {}. {}"
_INSTEAD = (
    "--cg-moe-exchange peer is for expert-parallel ranks of one host whose GPUs access each "
    "other's memory: type --cg-moe-exchange nccl"
)
_SEE_ALL = (
    "Torch takes GPUs with one number for one GPU: let each rank see all GPUs of the host "
    "(CUDA_VISIBLE_DEVICES), or type --cg-moe-exchange nccl"
)
LIMIT = timedelta(minutes=10)
"""How long an exchange outside of graphs waits for a rank, as long as NCCL's default."""

_SYMMETRIC = "torch.distributed._symmetric_memory"
_EMPTY = Symbol(f"{_SYMMETRIC}:empty", "memory that other GPUs can map")
_RENDEZVOUS = Symbol(f"{_SYMMETRIC}:rendezvous", "what maps it", parameters=("tensor", "group"))
_HANDLE = Symbol(
    "torch._C._distributed_c10d:_SymmetricMemory",
    "mapped memory",
    attributes=("barrier", "buffer_ptrs", "rank"),
)
RELIES_ON = (_EMPTY, _RENDEZVOUS, _HANDLE)


class _Slots(NamedTuple):
    """The slots of this rank for rows of one size, and where those of the others are."""

    rows: torch.Tensor
    """Uint8 ``[ranks * slot, bytes of a row]``."""
    addresses: torch.Tensor
    """Int64 ``[ranks]``: where the slots of each rank begin, for kernels of this GPU."""
    handle: Any
    """Torch's; it has the barrier."""


class PeerMemory:
    """A :class:`~megatron_cg.moe.slots.Transport` by writes to the memory of other GPUs.

    ``group`` are expert-parallel ranks of one host, whose GPUs can access each other's memory. On
    the CPU, for the tape, it is a :class:`~megatron_cg.moe.slots.Collective`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._slots: dict[tuple[int, int], _Slots] = {}
        self._used: set[tuple[int, int]] = set()
        """Slots that were used since the last capture ended."""
        self._held: list[set[tuple[int, int]]] = []
        """Those of the graphs of each model."""
        self._kept = False

    def hold(self) -> Callable[[], None]:
        """Keep what was used since the last call for graphs, and free what no graphs need.

        Returns the undo, for when the graphs are closed.
        """
        used, self._used = self._used, set()
        self._held.append(used)
        self._free_others()

        def leave() -> None:
            self._held.remove(used)
            if self._slots and _at_rest():
                self._keep(self._held or self._used)

        return leave

    def forget(self) -> None:
        """Free what was used since the last capture, for one that failed on all ranks."""
        self._used.clear()
        self._free_others()

    def _free_others(self) -> None:
        if self._slots and _at_rest():
            for key in self._slots.keys() - self._used.union(*self._held):
                del self._slots[key]
            self._keep(self._held or self._used)

    def _keep(self, wanted: object) -> None:
        """See Note [Left to the driver]."""
        if bool(wanted) != self._kept:
            self._kept = not self._kept
            change = ctypes.pythonapi.Py_IncRef if self._kept else ctypes.pythonapi.Py_DecRef
            change(ctypes.py_object(self))

    def __call__(self, rows: torch.Tensor, here: Places, there: Places) -> torch.Tensor:
        """Raises CaptureError on all ranks if they cannot map each other's memory."""
        if not rows.is_cuda:
            return Collective(self._group)(rows, here, there)
        from megatron_cg.moe.kernels import read_rows, write_rows

        flat = rows.contiguous().view(len(rows), -1)
        slots = self._of(len(here.packed), flat.shape[1] * flat.element_size())
        in_graph = torch.cuda.is_current_stream_capturing()
        limit = 0 if in_graph else round(LIMIT.total_seconds() * 1000)
        slots.handle.barrier(timeout_ms=limit)
        rank, count = slots.handle.rank, len(here.packed)
        write_rows(flat, here.in_slots, slots.addresses, rank, count)
        slots.handle.barrier(timeout_ms=limit)
        slot = count // len(slots.addresses)
        received = read_rows(
            slots.rows, flat, here.packed, there.in_slots, there.used, rank=rank, slot=slot
        )
        return received.view(len(received), *rows.shape[1:])

    def _of(self, places: int, size: int) -> _Slots:
        key = (places, size)
        if key not in self._slots:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"a graph needs slots of {places:,} rows of {size:,} bytes in the memory of "
                    "other GPUs, and no warmup pass has made them: give the capture at least one "
                    "warmup iteration"
                )
            self._slots[key] = self._made(places, size)
        self._used.add(key)
        self._keep(wanted=True)
        return self._slots[key]

    def _made(self, places: int, size: int) -> _Slots:
        ranks = dist.get_world_size(self._group)
        device = torch.device("cuda", torch.cuda.current_device())
        problem = None
        try:
            rows = _EMPTY.find()(places, size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = _first_line(error)
        _require_on_all(self._group, problem, places * size)
        try:
            handle = _RENDEZVOUS.find()(rows, self._group)
        except RuntimeError as error:
            reason = _first_line(error)
            remedy = _SEE_ALL if "overlapping devices" in reason else _INSTEAD
            raise CaptureError(_CANNOT.format(ranks, reason.rstrip("."), remedy)) from error
        addresses = list(handle.buffer_ptrs)
        if addresses[handle.rank] != rows.data_ptr():
            raise changed("torch", _RENDEZVOUS.path, "where each rank's tensor begins")
        return _Slots(rows, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


def _at_rest() -> bool:
    """Whether the GPU has run all that is queued; False if it is in an error state."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _require_on_all(group: dist.ProcessGroup, problem: str | None, size: int) -> None:
    """Raise on all ranks if one could not allocate or they run on several hosts. A collective call.

    Torch would wait for the other ranks' memory in vain.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (socket.gethostname(), problem), group)
    hosts = sorted({host for host, _ in told})
    if len(hosts) > 1:
        where = f"they run on {', '.join(hosts)}"
        raise CaptureError(_CANNOT.format(len(told), where, _INSTEAD))
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            raise CaptureError(
                f"expert-parallel rank {rank} of {len(told)} cannot allocate {size / 2**20:,.1f} "
                f"MiB for rows that other GPUs write: {failure}. --cg-moe-rows 1.25 makes them "
                "fewer; without such memory: --cg-moe-exchange nccl"
            )
