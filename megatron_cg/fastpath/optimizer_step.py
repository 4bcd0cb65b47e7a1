"""What the optimizer reads and writes: main gradients and weights, and FusedAdam's step.

The host takes longer for it than the GPU: it walks over the parameters several times and makes a
new DTensor for each access to data. Here main gradients and weights come from a table, and the same
kernel steps on lists of local tensors. Tensors, kernels and numbers are looked up in each call,
which sees a loaded checkpoint, a new gradient or a replaced moment.

Note [From a table]
    Megatron-FSDP finds the slice of each parameter in every step. Here each slice is cut once and
    reused as long as its buffer is the same tensor. Megatron-FSDP makes the DTensors around the
    slices, in the first step; if one is not there, its own function runs. Its copies would be
    beside the graphs' memory, and the allocator would keep them (2.4 GiB of preset ``qwen3-moe``).

Note [Copies in borrowed memory]
    The activations in a graph's pool stay reserved, since every replay writes to the same
    addresses. But they are unused from the last backward pass of a step to the first forward pass
    of the next one. The copies that the optimizer reads live from there to ``zero_grad``. So they
    may borrow that memory. A block that was freed while its graph was captured counts as reserved
    and not as allocated, although every replay writes to it.
    Gradients that a script keeps longer are relocated before the next forward pass. Any other
    tensor in the same memory (``p.grad.detach()``, a local tensor) is overwritten by the next
    replay. It is detected before, too late to save it: a warning follows, and no more is borrowed.
    Each parameter has a piece of its own: small pieces fit between other tensors, and one piece per
    bucket would need memory of its own (3.6 GiB more reserved, preset ``qwen3-moe``).

Note [What is borrowed]
    Only blocks that were freed while the graphs were captured are borrowed. The allocator itself
    allocates them, as for another graph of the pool, on the capture stream, to which they belong.
    The borrower uses them on the stream that replays the graphs, which orders this use after the
    graphs of one step and before those of the next.
    No kernel may run on the capture stream, though: one that fills new memory would race with
    writes on the other stream. So bare storages are allocated with deterministic algorithms.
    The pool must not grow, since activations could not use the growth. So the first time, a block
    is searched for each piece among the allocator's free blocks, by its own rule (:func:`take`).
    Only pieces with a block are allocated there. If the pool grows anyway, no more is borrowed.

Note [What is still held]
    If somebody still holds a piece when its caller asks again, the pool has no second place for it.
    The caller then gets ordinary memory, that time.

Note [What TE's applier does]
    ``multi_tensor_applier`` (transformer-engine 2.20.2) takes the local tensor of each DTensor,
    drops the entries where the first list's tensor has no elements, adds the chunk size, and calls
    the kernel if any entry is left. It does this tensor by tensor, in Python.
"""

import logging
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from megatron_cg.backends.base import uninitialized
from megatron_cg.backends.driver import StorageReference
from megatron_cg.fastpath.part import NotApplicableError, float8_test, known
from megatron_cg.fsdp.roles import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import Undo, combine_undos, replace_function, wrap_method
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_ATTACH, _INSTALL = "update_main_grads", "copy_main_weights_to_model_weights"
REPLACES_ATTACHING = fsdp_function(
    f"ParamAndGradBuffer.{_ATTACH}", "what gives the optimizer its gradients", "bfef5848565df378"
)
REPLACES_INSTALLING = fsdp_function(
    f"ParamAndGradBuffer.{_INSTALL}", "what copies main weights", "64c2878b6e09f195"
)
_PLAIN = {torch.Tensor, nn.Parameter}
_OPTIMIZERS = "transformer_engine.pytorch.optimizers"
_FUSED = f"{_OPTIMIZERS}.fused_adam"
_HAS = ("capturable", "master_weights", "use_decoupled_grad", "multi_tensor_adam", "adam_w_mode")
_ADAM = Symbol(f"{_FUSED}:FusedAdam", "the optimizer", attributes=(*_HAS, "_dummy_overflow_buf"))
_APPLIER = Symbol(f"{_FUSED}:multi_tensor_applier", "what runs its kernel")
_AT_MOST = Symbol(f"{_FUSED}:_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL", "the tensors of one call")
APPLIES = Symbol(f"{_OPTIMIZERS}.multi_tensor_apply:MultiTensorApply", "what runs kernels")
APPLYING = known(f"{APPLIES.path}.__call__", "what runs a kernel", "ac91ff4a196ee3fc")
REPLACES_STEP = (
    known(f"{_ADAM.path}.step", "its step", "80a579d335ac25c3"),
    known(f"{_ADAM.path}.get_unscaled_state", "its moments", "e675df68fc21fd25"),
    APPLYING,
)
_BEGIN, _END, _RELEASE = (
    Symbol(f"torch._C:_cuda_{name}", "what turns allocations to a pool")
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool")
)
RELIES_ON = (
    *(_BEGIN, _END, _RELEASE),
    *(*REPLACES_ATTACHING, *REPLACES_INSTALLING),
    *fsdp_class("ParamAndGradBuffer", "optimizer_named_parameters", "dist_main_grad"),
    *fsdp_class("ParamAndGradBuffer", "use_decoupled_grad", "bucketing_policy"),
    *fsdp_class("ParamAndGradBuffer", "parameter_groups", "param_to_param_group"),
    *fsdp_class("DataParallelBuffer", "data", "get_item", "param_idx", "is_data_distributed"),
    *(*REPLACES_STEP, _ADAM, _APPLIER, APPLIES, _AT_MOST),
)


SMALL = 1 << 20
"""Bytes up to which the allocator takes blocks of another kind, which are not worth borrowing."""
_ROUND = 512


class IdlePool:
    """Scratch memory of one graph pool; see Note [What is borrowed]."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool, self._index = pool, torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        free = Counter[int]()
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == pool:
                free[segment["stream"]] += segment["total_size"] - segment["allocated_size"]
        stream = max(free, key=free.__getitem__, default=None)
        self._stream = torch.cuda.ExternalStream(stream) if stream is not None else None
        self._borrowed: dict[Hashable, list[int]] = {}
        """For each caller, which of its pieces the pool has a place for."""
        self._given: dict[Hashable, list[StorageReference]] = {}
        self._stopped = False
        self.borrowed_bytes = 0
        """Bytes that the callers so far borrow, which the next replay writes."""

    def report_held(self) -> int:
        """How many borrowed tensors somebody still holds; if any, warn and borrow no more."""
        given, self._given = self._given, {}
        held = sum(not piece.expired() for pieces in given.values() for piece in pieces)
        if held:
            self._borrowed.clear()
            self._stopped, self.borrowed_bytes = True, 0
            logger.warning(
                "megatron_cg: when the optimizer has stepped, at least %d tensors still share "
                "memory with its gradients. The graphs use that memory in the next forward pass, "
                "so the values of these tensors are lost: clone what you want to keep. From now "
                "on, gradients have their own memory.",
                held,
            )
        return held

    def empty(
        self, caller: Hashable, like: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """A contiguous, uninitialised tensor with the shape of each of ``like``.

        A caller asks for the same shapes each time, and callers ask in the same order.
        """
        shapes = [tensor.shape for tensor in like]
        if caller not in self._borrowed:
            self._borrowed[caller] = self._places(shapes, dtype)
        held = [piece for piece in self._given.get(caller, ()) if not piece.expired()]
        # See Note [What is still held].
        places = self._borrowed[caller] if not held else []
        inside: dict[int, torch.Tensor] = {}
        if places:
            with self._allocating():
                inside = {place: self._new(shapes[place], dtype) for place in places}
        held += [StorageReference(tensor.untyped_storage()) for tensor in inside.values()]
        self._given[caller] = held
        return [
            inside[place] if place in inside else self._new(shape, dtype)
            for place, shape in enumerate(shapes)
        ]

    def _places(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[int]:
        """Allocate each piece that has a block, to see what the pool gives without growing."""
        blocks = [] if self._stopped else self._free_blocks()
        before = torch.cuda.memory_reserved(self._index)
        places: list[int] = []
        tried: list[torch.Tensor] = []
        for place, shape in enumerate(shapes):
            nbytes = shape.numel() * dtype.itemsize
            if take(blocks, nbytes) is None:
                continue
            try:
                with self._allocating():
                    tried.append(self._new(shape, dtype))
            except torch.OutOfMemoryError:
                self._stopped = True
            self._stopped = self._stopped or torch.cuda.memory_reserved(self._index) != before
            if self._stopped:
                break
            places.append(place)
            self.borrowed_bytes += nbytes
        return places

    def _free_blocks(self) -> list[int]:
        stream = self._stream.cuda_stream if self._stream is not None else None
        return sorted(
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self._pool and segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] > SMALL
        )

    def _new(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that no kernel has filled; see Note [What is borrowed]."""
        if not torch.are_deterministic_algorithms_enabled():
            return torch.empty(shape, dtype=dtype, device=self._device)
        return uninitialized(shape.numel() * dtype.itemsize, self._device).view(dtype).view(shape)

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        assert self._stream is not None
        begin, end, release = _BEGIN.find(), _END.find(), _RELEASE.find()
        with torch.cuda.stream(self._stream):
            begin(self._index, self._pool)
            try:
                yield
            finally:
                end(self._index, self._pool)
                release(self._index, self._pool)


def take(blocks: list[int], nbytes: int) -> int | None:
    """Take the free block for a piece out of ``blocks`` and return its size; None if none fits.

    As in torch 2.11's allocator, a piece is rounded up to 512 bytes and takes the smallest block
    that fits; the rest of it is a block again if it has more than a MiB. Pieces of a MiB or less
    never fit. ``blocks`` are sizes in bytes, ascending.
    """
    wanted = -(-nbytes // _ROUND) * _ROUND
    place = bisect_left(blocks, wanted)
    if wanted <= SMALL or place == len(blocks):
        return None
    block = blocks.pop(place)
    if block - wanted > SMALL:
        insort(blocks, block - wanted)
    return block


def copied(
    scratch: IdlePool | None, caller: Hashable, pieces: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Copies of ``pieces`` in another dtype, in ``scratch`` if there is one."""
    if scratch is None:
        copies = [torch.empty_like(piece, dtype=dtype) for piece in pieces]
    else:
        copies = scratch.empty(caller, pieces, dtype)
    torch._foreach_copy_(copies, pieces)
    return copies


def install_main_gradients(fsdp: Any, scratch: IdlePool | None) -> Callable[[], None]:
    """Attach gradients to the optimizer's parameters from a table; returns the undo.

    ``scratch`` is memory for their copies, see Note [Copies in borrowed memory]; None: ordinary.
    """
    store = fsdp.param_and_grad_buffer
    table = _GradientTable(store, scratch)

    def relocate() -> None:
        if table.borrowed and fsdp.training and torch.is_grad_enabled():
            table.relocate()

    return combine_undos(
        (replace_function(store, _ATTACH, table), wrap_method(fsdp, "forward", before=relocate))
    )


Cast = tuple[torch.device, torch.dtype, torch.dtype]
"""Device of gradients, and the dtypes they are cast from and to."""
Row = tuple[Any, Any, torch.Tensor]
"""A parameter, the DTensor that Megatron-FSDP made, and its piece of the bucket's buffer. The
DTensor's local tensor is None after ``zero_grad``."""


class _GradientTable:
    """Replaces ``update_main_grads``."""

    def __init__(self, store: Any, scratch: IdlePool | None) -> None:
        self._store, self._original, self._scratch = store, store.update_main_grads, scratch
        self._read_from: list[tuple[Any, torch.Tensor]] = []
        """Each bucket's buffer of gradients, and the tensor that it was when it was read."""
        self._rows: dict[Cast | None, list[Row]] = {}
        """None: those that are read in place."""
        self._empty: list[Any] = []
        """Parameters of which this rank's shard is empty."""
        self.borrowed = False
        """Whether copies may be in memory that the next replay writes to."""

    def __call__(self) -> None:
        moved = any(buffer.data is not data for buffer, data in self._read_from)
        if (moved or not self._read_from) and not self._read():
            self._original()
            return
        attribute = "decoupled_grad" if self._store.use_decoupled_grad else "grad"
        for cast, rows in self._rows.items():
            pieces = [piece for _, _, piece in rows]
            if cast is not None:
                for _, gradient, _ in rows:
                    # Release this step's earlier copies, if gradients are scaled once reduced.
                    gradient._local_tensor = None
                pieces = copied(self._scratch, cast, pieces, cast[-1])
            for (parameter, gradient, _), piece in zip(rows, pieces, strict=True):
                gradient._local_tensor = piece
                setattr(parameter, attribute, gradient)
        for parameter in self._empty:
            setattr(parameter, attribute, None)
        self.borrowed = self._scratch is not None and self._scratch.borrowed_bytes > 0

    def relocate(self) -> None:
        self.borrowed = False
        casts = (rows for cast, rows in self._rows.items() if cast is not None)
        for _, gradient, _ in chain.from_iterable(casts):  # A name for a copy would hold it below.
            if gradient._local_tensor is not None:
                gradient._local_tensor = gradient._local_tensor.clone()
        if self._scratch is not None:
            self._scratch.report_held()

    def _read(self) -> bool:
        """Read which slice is each parameter's; False if a DTensor is not made yet."""
        store = self._store
        sharded = store.bucketing_policy.data_parallel_sharding_strategy != "no_shard"
        buffers: dict[int, Any] = {}
        rows: dict[Cast | None, list[Row]] = {}
        empty = []
        for name, parameter in store.optimizer_named_parameters:
            original = parameter.orig_param
            number = store.param_to_param_group[original]
            group = store.parameter_groups[number]
            buffer, gradient = group.main_grad_buffer, store.dist_main_grad.get(name)
            if buffer is None:
                continue
            if gradient is None:
                return False
            buffers[number], data = buffer, buffer.data
            piece = buffer.get_item(buffer.param_idx[original], only_shard=sharded)
            if not piece.numel():
                empty.append(parameter)
                continue
            has_main_weights = group.main_weight_buffer is not None and not store.use_decoupled_grad
            casts = has_main_weights and parameter.dtype != data.dtype
            cast = (data.device, data.dtype, parameter.dtype) if casts else None
            piece = piece.view(-1, *original.shape[1:])
            rows.setdefault(cast, []).append((parameter, gradient, piece))
        self._rows, self._empty = rows, empty
        self._read_from = [(buffer, buffer.data) for buffer in buffers.values()]
        return True


def install_main_weights(fsdp: Any) -> Callable[[], None]:
    """Copy main weights into model weights with one fused call per bucket; returns the undo.

    Raises NotApplicableError if weights are quantised, or if no buffer holds model weights.
    """
    store, is_float8 = fsdp.param_and_grad_buffer, float8_test(fsdp)
    if any(is_float8(p) for group in store.parameter_groups for p in group.params):
        raise NotApplicableError("primary weights are FP8, and quantised after each step")
    for group in store.parameter_groups:
        if group.main_weight_buffer is not None and group.model_weight_buffer is None:
            raise NotApplicableError(
                "parameters are not sharded, and no buffer holds model weights"
            )
    return replace_function(store, _INSTALL, _WeightTable(store))


class _WeightTable:
    """Replaces ``copy_main_weights_to_model_weights``."""

    def __init__(self, store: Any) -> None:
        self._groups = [g for g in store.parameter_groups if g.main_weight_buffer is not None]
        self._cut_from: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pieces: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """The shards of each bucket's parameters, to copy to and from; no empty ones."""

    @torch.no_grad()
    def __call__(self) -> None:
        data = [(g.model_weight_buffer.data, g.main_weight_buffer.data) for g in self._groups]
        if not all(map(is_, chain(*data), chain(*self._cut_from))) or not self._pieces:
            self._cut_from, self._pieces = data, list(map(_cut, self._groups))
        for model, main in self._pieces:
            if model:
                torch._foreach_copy_(model, main)


def _cut(group: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, main = group.model_weight_buffer, group.main_weight_buffer
    shard = bool(model.is_data_distributed or main.is_data_distributed)
    places = [main.param_idx[parameter] for parameter in group.params]
    pairs = [[buffer.get_item(at, only_shard=shard) for buffer in (model, main)] for at in places]
    targets = [to for to, _ in pairs if to.numel() > 0]
    return targets, [source.view(to.shape) for to, source in pairs if to.numel() > 0]


def install_adam(optimizers: Iterable[Any]) -> Undo:
    """Shorten the step of every FusedAdam among ``optimizers``; returns the undo.

    ``optimizers`` are Megatron's, chained or not, or torch's.

    Raises NotApplicableError if none of them is a FusedAdam with simple lists.
    """
    if _FUSED not in sys.modules:
        raise NotApplicableError("no optimizer is Transformer Engine's FusedAdam")
    kind = _ADAM.find()
    adams = dict.fromkeys(inner for inner in inner_optimizers(optimizers) if type(inner) is kind)
    simple = [adam for adam in adams if not _is_special(adam)]
    if not simple:
        why = "is not FusedAdam"
        if adams:
            why = "keeps main weights itself, runs in a graph, or has a step of its own"
        raise NotApplicableError(f"the optimizer {why}")
    return combine_undos(replace_function(adam, "step", LocalStep(adam)) for adam in simple)


def inner_optimizers(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Megatron's and torch's optimizers in these, each behind those inside of it."""
    for optimizer in optimizers:
        yield from inner_optimizers(getattr(optimizer, "chained_optimizers", ()))
        inner = vars(optimizer).get("optimizer")
        if inner is not None:
            yield from inner_optimizers([inner])
        yield optimizer


def _is_special(adam: Any) -> bool:
    # A wrapped step does more: that of ``fully_shard_optimizer`` installs weights.
    wrapped = "step" in vars(adam)
    return bool(adam.capturable or adam.master_weights or adam.use_decoupled_grad or wrapped)


class LocalStep:
    """Replaces ``FusedAdam.step``."""

    def __init__(self, adam: Any) -> None:
        self._adam, self._original = adam, adam.step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step. With arguments or with torch's hooks it is TE's own step."""
        adam, applier = self._adam, _APPLIER.find()
        is_usual = type(applier) is APPLIES.cached and not (args or kwargs or _has_hooks(adam))
        launches = self._launches() if is_usual else None
        if launches is None:
            return self._original(*args, **kwargs)
        for group in adam.param_groups:
            group["step"] += 1
        with torch.no_grad():
            for tensors, numbers in launches:
                flag = adam._dummy_overflow_buf
                adam.multi_tensor_adam(applier.chunk_size, flag, tensors, *numbers)
        return None

    def _launches(self) -> list[tuple[list[list[torch.Tensor]], tuple[Any, ...]]] | None:
        """Tensors and numbers of each launch of the next step; None if TE's own step must run."""
        adam, most = self._adam, _AT_MOST.find()
        launches = []
        for group in adam.param_groups:
            lists = _lists(group["params"], adam.state)
            if lists is None or type(group.get("step")) is not int:
                return None
            numbers = (
                *(group["lr"], *group["betas"], group["eps"], group["step"] + 1),
                *(adam.adam_w_mode, 1 if group["bias_correction"] else 0, group["weight_decay"]),
            )
            for start in range(0, len(lists[0]), most):
                some = [tensors[start : start + most] for tensors in lists]
                sizes = list(map(torch.Tensor.numel, some[0]))
                if not all(sizes):
                    some = [list(compress(tensors, sizes)) for tensors in some]
                if some[0]:
                    launches.append((some, numbers))
        return launches


def _has_hooks(adam: Any) -> bool:
    return bool(
        adam._optimizer_step_pre_hooks
        or adam._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _lists(
    parameters: Sequence[Any], states: Mapping[Any, Mapping[str, Any]]
) -> list[list[torch.Tensor]] | None:
    """Gradients, weights and moments of the parameters that have a gradient.

    None if TE does more with one of them than pass it to the kernel, or if only some of them are
    DTensors.
    """
    rows = []
    for parameter in parameters:
        state, gradient = states[parameter], parameter.grad
        if state.keys() != {"exp_avg", "exp_avg_sq"}:
            return None
        if gradient is not None:
            rows.append((gradient, parameter, state["exp_avg"], state["exp_avg_sq"]))
    lists = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    if set(map(type, chain.from_iterable(lists))) == {DTensor}:
        lists = [[tensor._local_tensor for tensor in tensors] for tensors in lists]
    tensors = [*chain.from_iterable(lists)]
    are_plain = {*map(type, tensors)} <= _PLAIN and {t.dtype for t in tensors} <= {torch.float32}
    return lists if are_plain else None
