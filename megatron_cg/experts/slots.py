"""An exchange of rows between ranks by counts that stay on the device.

Note [Slots]
    An all-to-all takes its counts on the host, which a graph cannot. So here each rank has room for
    the same number of rows from each rank: a slot, whose rest is padding. Rows are moved into slots
    and out of them by indices that are computed on the device. A :class:`Transport` fills the slots
    of other ranks: :func:`by_all_to_all`, or :class:`PeerMemory`, which writes to other GPUs.

Note [Padding]
    Padding may be anything. No result has it: a row that a slot had no room for is zero. A rank
    that gets fewer rows than fit has rows at the end that nothing reads. They may be anything too.
    An all-to-all of whole slots sends padding: with *R* ranks, *R* times the rows on average. The
    kernel of :class:`PeerMemory` writes only the rows, by counts on the device.

Note [Two barriers]
    A rank may write to a slot only after its owner has read what was written there before, and the
    owner may read only after the write. So a barrier comes before the writes, and another one after
    them: kernels that wait for signals of the other GPUs, and that all ranks must run, as a
    collective. The graph is known to contain collectives by the gather of token counts, which
    Megatron's dispatcher runs for each exchange.
    Outside of graphs a barrier waits :data:`LIMIT` at most. Torch then prints which rank waited for
    which, and the GPU is in an error state. In a graph there is no limit: NCCL's watchdog limits
    the gather before it, and a replay may wait for a rank that writes a checkpoint.

Note [Memory outside of torch's allocator]
    Other GPUs map the memory, so torch's caching allocator and its statistics do not have it. All
    layers of a group share it: an exchange reads its rows out of it before the next one begins.
    Graphs address it and do not hold it. Deleted graphs leave it to the next capture, and a capture
    frees what no graphs address: torch loses some bytes with each memory that it frees (torch 2.11,
    ``CUDASymmetricMemory.cu``, ``CUDAPeerAllocInfo``).

Note [Left to the driver]
    To free the memory, torch waits for the GPU: without end if a barrier waits for a rank that is
    gone. After a CUDA error torch ends the process there (``~AllocationRef``). So from its first
    use until its graphs are closed, a reference that nobody owns keeps the memory, also when the
    process ends. ``integrations/teardown.py`` leaves graphs to the driver likewise.
"""

import ctypes
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_cg.errors import CaptureError, say
from megatron_cg.upstream.symbols import Symbol, changed

_CANNOT = "the {} expert-parallel ranks cannot map each other's GPU memory: {}. {}"
_INSTEAD = (
    "{flag:--cg-moe-exchange peer} is for expert-parallel ranks of one host whose GPUs access each "
    "other's memory: {type:--cg-moe-exchange nccl}"
)
_SEE_ALL = (
    "Torch takes GPUs with one number for one GPU: let each rank see all GPUs of the host "
    "(CUDA_VISIBLE_DEVICES), or {type:--cg-moe-exchange nccl}"
)
_FEWER = (
    "{flag:--cg-moe-rows 1.25} makes them fewer; without such memory: {flag:--cg-moe-exchange nccl}"
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


class Places(NamedTuple):
    """Where the rows of one rank lie, packed and in slots; see :func:`find_places`."""

    packed: torch.Tensor
    """Int64 ``[ranks * slot]``: of each place in the slots, its packed row."""
    in_slots: torch.Tensor
    """Int64 ``[rows]``: of each packed row, its place in the slots; ``ranks * slot`` if none."""
    used: torch.Tensor
    """Int64 ``[1]``: how many packed rows are read; what lies beyond them may be anything."""


Transport = Callable[[torch.Tensor, Places, Places], torch.Tensor]
"""Sends rows that are packed as the first places say; returns those of the second, packed.

``[rows, ...]`` both; all ranks call it. What has no place is not sent, and received as zero if it
is among the rows that are used.
"""


def find_places(
    counts: torch.Tensor,
    slot: int,
    rows: int,
    *,
    whole: bool = False,
    gaps: torch.Tensor | None = None,
) -> Places:
    """Find where rows lie that are packed by expert, then by rank, and by expert in each slot.

    Args:
        counts: int64 ``[ranks, experts]``: rows for each expert that are exchanged with each rank.
        slot: rows of a slot. What a rank has beyond it has no place in the slots.
        rows: the number of packed rows, at least as many as all counts add up to.
        whole: whether those beyond all counts are read too, as zero.
        gaps: int64 ``[experts]``: packed rows behind those of each expert, received as zero.
    """
    gaps = None if gaps is None else gaps.cumsum(0)
    if counts.is_cuda and find_spec("triton") is not None:
        from megatron_cg.experts.kernels import places_of

        return Places(*places_of(counts, slot, rows, gaps, whole=whole))
    ranks, experts = counts.shape
    device = counts.device
    ends_in_slot = counts.cumsum(1)
    starts_in_slot = ends_in_slot - counts
    lengths = counts.t().reshape(-1)
    ends = lengths.cumsum(0)
    beyond = ends[-1:]
    if gaps is not None:
        beyond = beyond + gaps[-1:]
        ends[ranks:] += gaps[:-1].repeat_interleave(ranks)
    starts = ends - lengths
    # Of a packed row: its chunk, which is of one expert and one rank.
    row = torch.arange(rows, device=device)
    chunk = torch.searchsorted(ends, row, right=True).clamp_(max=ranks * experts - 1)
    inside = row - starts[chunk] + starts_in_slot.t().reshape(-1)[chunk]
    exchanged = (starts[chunk] <= row) & (row < ends[-1]) & (inside < slot)
    in_slots = torch.where(exchanged, chunk % ranks * slot + inside, ranks * slot)
    # Of a place in a slot: its expert.
    place = torch.arange(slot, device=device).repeat(ranks, 1)
    expert = torch.searchsorted(ends_in_slot, place, right=True).clamp_(max=experts - 1)
    before = starts.view(experts, ranks).t() - starts_in_slot
    packed = (before.gather(1, expert) + place).where(place < ends_in_slot[:, -1:], 0)
    used = torch.full_like(beyond, rows) if whole else beyond
    return Places(packed.view(-1), in_slots, used)


def exchange(rows: torch.Tensor, here: Places, there: Places, transport: Transport) -> torch.Tensor:
    """Let ``transport`` send rows, with autograd. All ranks call it, with slots of one size."""
    apply: Callable[..., torch.Tensor] = _Exchange.apply
    return apply(rows, transport, *here, *there)


class _Exchange(torch.autograd.Function):
    """Its backward function is the exchange in the other direction.

    Autograd's own backward function of indexing would add up rows, though each appears once.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, transport: Transport, *places: torch.Tensor
    ) -> torch.Tensor:
        """``places`` are those here and there, as tensors that autograd has to see."""
        ctx.save_for_backward(*places)
        ctx.transport = transport
        return transport(rows, *_here_and_there(places))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        here, there = _here_and_there(ctx.saved_tensors)
        return ctx.transport(gradients[0], there, here), None, *[None] * len(ctx.saved_tensors)


def _here_and_there(tensors: Sequence[torch.Tensor]) -> tuple[Places, Places]:
    half = len(Places._fields)
    return Places(*tensors[:half]), Places(*tensors[half:])


def by_all_to_all(
    group: dist.ProcessGroup, rows: torch.Tensor, here: Places, there: Places
) -> torch.Tensor:
    """With a group, a :class:`Transport` by one all-to-all of whole slots, padding included.

    It works on NCCL and gloo, inside a graph too. Padding repeats some row.
    """
    sent = rows.index_select(0, here.packed)
    received = rows.new_empty((len(sent) + 1, *sent.shape[1:]))
    if dist.get_world_size(group) > 1:
        dist.all_to_all_single(received[:-1], sent, group=group)
    else:
        received[:-1] = sent
    received[-1].zero_()
    return received.index_select(0, there.in_slots)


class _Slots(NamedTuple):
    """The slots of this rank for rows of one size, and where those of the others are."""

    rows: torch.Tensor
    """Uint8 ``[ranks * slot, bytes of a row]``."""
    addresses: torch.Tensor
    """Int64 ``[ranks]``: where the slots of each rank begin, for kernels of this GPU."""
    handle: Any
    """Torch's; it has the barrier."""


class PeerMemory:
    """A :class:`Transport` by writes to the memory of other GPUs.

    ``group`` are expert-parallel ranks of one host, whose GPUs can access each other's memory. On
    the CPU, for the tape, it is :func:`by_all_to_all`.
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
            return by_all_to_all(self._group, rows, here, there)
        from megatron_cg.experts.kernels import read_rows, write_rows

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
            refuse_in_graph(f"slots of {places:,} rows of {size:,} bytes in other GPUs' memory")
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
            problem = str(error).partition("\n")[0]
        _require_on_all(self._group, problem, places * size)
        try:
            handle = _RENDEZVOUS.find()(rows, self._group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            remedy = _SEE_ALL if "overlapping devices" in reason else _INSTEAD
            raise CaptureError(_CANNOT.format(ranks, reason, say(remedy))) from error
        addresses = list(handle.buffer_ptrs)
        if addresses[handle.rank] != rows.data_ptr():
            raise changed("torch", _RENDEZVOUS.path, "where each rank's tensor begins")
        return _Slots(rows, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


def refuse_in_graph(memory: str) -> None:
    """Raise CaptureError if a graph is captured now: a warmup pass must make its memory."""
    if torch.cuda.is_current_stream_capturing():
        lacks = f"a graph needs {memory}, which no warmup pass has made"
        raise CaptureError(f"{lacks}: give the capture at least one warmup iteration")


def _at_rest() -> bool:
    """Whether the GPU has run all that is queued; False if it is in an error state."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _require_on_all(group: dist.ProcessGroup, problem: str | None, size: int) -> None:
    """Raise on all ranks if one could not allocate or they run on several hosts. A collective call.

    Torch would wait for the other ranks' memory in vain.
    """
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (socket.gethostname(), problem), group)
    hosts = sorted({host for host, _ in told})
    if len(hosts) > 1:
        where = f"they run on {', '.join(hosts)}"
        raise CaptureError(_CANNOT.format(len(told), where, say(_INSTEAD)))
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            raise CaptureError(
                f"expert-parallel rank {rank} of {len(told)} cannot allocate {size / 2**20:,.1f} "
                f"MiB for rows that other GPUs write: {failure}. {say(_FEWER)}"
            )
