"""Activations of dropless experts, kept for the backward pass as the rows that were used.

Note [What is kept]
    Experts in a graph, and what they save for the backward pass, have room for any routing: with
    *R* expert-parallel ranks *R* times the rows on average. Here the used rows are copied to one
    buffer, and the saved tensors are dropped: passes that are captured later use their memory. In
    the backward pass a tensor of the old shape gets the rows back. Its other rows may be anything:
    Note [Rows without an expert] in ``grouped_gemm.py``.

Note [One push of a pass]
    What a layer's experts save is moved when their forward pass ends. So views of one tensor are
    kept once, and what was discarded by then, to be computed again (``moe_act``), is left alone.
    So are weights, copies of them in another dtype, counts and indices.

Note [Any order of passes]
    A counter on the device says where the next push goes. A pop moves it back if nothing was pushed
    on top. Otherwise that room stays occupied until the next step. So no order of passes overwrites
    rows that are needed, and a forward pass without a backward pass costs only room.

Note [Beyond the buffer]
    A push that does not fit writes nothing. Its pop gives zeros, so that all numbers stay finite,
    and the step is repeated as in Note [Beyond the bound] in ``row_bound.py``. The results of
    forward passes are right, so their rows are known after the last one.

Note [Sizes]
    The first warmup pass of a capture decides: the factor times the most rows that a rank's layers
    have received in one microbatch of eager training, the most of all ranks. The layers of a model
    are alike, so the first one's bytes of a row are those of all.

Note [Whose memory]
    Between a step's last backward pass and the next forward pass nothing is kept. So the buffer
    belongs to the graphs' pool, like their activations, and the optimizer may borrow it: Note
    [Copies in borrowed memory] in ``optimizer_step.py``. A captured pass makes it in the pool, and
    it is freed when the capture has ended, for no other capture uses that pool. Warmup passes have
    a buffer as long as rows are in it. A tape does not own it, so it is kept for a tape.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.backends.base import uninitialized
from megatron_cg.experts.slots import refuse_in_graph
from megatron_cg.upstream.te import fp8_recipe

logger = logging.getLogger(__name__)
_say_once = cache(logger.info)

_MULTIPLE = 16
"""Rows of a push are a multiple of it, so that each of its tensors begins at a multiple of it."""
_GARBAGE = 0xFF
"""NaN in every floating dtype, for what a GPU leaves uninitialized."""


class _Saved:
    """A tensor that autograd has saved in experts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.kept: _Storage | None = None
        """Where its rows are, without ``tensor``."""
        self.view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class _Storage:
    """A storage of a push: ``[rows, width]`` bytes, of which ``before`` come before each row's."""

    def __init__(self, push: "_Push", rows: int, width: int, before: int, views: int) -> None:
        self._push, self._size, self._before = push, (rows, width), before
        self._views, self._left = views, 0
        self._memory: torch.Tensor | None = None
        """Its rows in the backward pass, until all views of it were taken."""

    def restored(self, saved: _Saved) -> torch.Tensor:
        if self._memory is None:
            self._push.pop()
            device = self._push.place.device
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=device)
            self._push.move(self._memory, self._before, back=True)
            self._left = self._views
        memory, self._left = self._memory, self._left - 1
        if self._left == 0:
            self._memory = None
        dtype, shape, stride, offset = saved.view
        return memory.view(dtype).as_strided(shape, stride, offset)


class Buffer:
    """The memory that graphs of one capture keep rows in: ``rows`` of ``width`` bytes."""

    def __init__(self, rows: int, width: int, top: torch.Tensor, most: torch.Tensor) -> None:
        self.rows, self.width, self.top, self.most = rows, width, top, most
        # A graph must not fill it. The last byte takes what is to be written nowhere.
        self.memory = uninitialized(rows * width + 1, top.device)


class _Push:
    """The rows of one pass, and where they are: int64 ``[start, before, end, used]`` on the device.

    The counter went from ``before`` to ``end``. ``start`` is ``before``, or -1 if they did not fit.
    """

    def __init__(self, buffer: Buffer, counts: torch.Tensor) -> None:
        self._buffer, self._is_popped = buffer, False
        used, before = counts.sum(), buffer.top[0]
        end = before + (used + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
        fits = end <= buffer.rows
        self.place = torch.stack([torch.where(fits, before, -1), before, end, used])
        beyond = torch.where(fits, 0, end).to(buffer.most.dtype)
        buffer.most.copy_(torch.maximum(buffer.most, beyond))
        buffer.top.copy_(end)

    def pop(self) -> None:
        """Free its room, before the first of its rows is read: nothing is pushed in between."""
        if not self._is_popped:
            self._is_popped, top = True, self._buffer.top
            _, before, end, _ = self.place
            top.copy_(torch.where(top == end, before, top))

    def move(self, memory: torch.Tensor, before: int, *, back: bool) -> None:
        """Copy used rows of uint8 ``[rows, width]`` to their place, or back."""
        buffer = self._buffer
        if memory.is_cuda:
            from megatron_cg.experts.kernels import move_rows

            return move_rows(memory, buffer.memory, self.place, buffer.width, before, back=back)
        start, first, end, used = self.place
        byte = torch.arange(memory.numel(), device=memory.device)
        is_used = byte < used * memory.shape[1]
        begin = start * buffer.width + (end - first) * before
        is_kept = is_used & (start >= 0)
        place = torch.where(is_kept, begin + byte, buffer.rows * buffer.width)
        if back:
            found = torch.where(is_kept, buffer.memory.index_select(0, place), 0)
            memory.view(-1).copy_(torch.where(is_used, found, _GARBAGE))
        else:
            buffer.memory.index_copy_(0, place, memory.view(-1))


class Stash:
    """The memory in which experts of graphs keep rows, of all models that are built with it.

    ``factor`` is how many times the rows that were used in eager training.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """By dispatcher: the most rows that it has received in an eager pass of training."""
        self._expected: Sequence[Any] = ()
        """The dispatchers of the next capture; all that have received rows if empty."""
        self.rows = self.voted = self._width = 0
        """Rows that a buffer has room for, those that were voted on, and bytes of a row."""
        self._captured: Buffer | None = None
        """That of the graphs of a capture, until it ends."""
        self._of_warmup: Callable[[], Buffer | None] = lambda: None
        self._top = self._most = torch.empty(0, device="cpu")

    def place(self, most: torch.Tensor) -> None:
        """Make the counter. ``most`` is int32 ``[1]`` for the rows that did not fit."""
        self._most = most
        self._top = torch.zeros(1, dtype=torch.int64, device="cuda")

    def saw(self, layer: Any, rows: int) -> None:
        """A dispatcher has received ``rows`` in an eager pass of training."""
        self._seen[layer] = max(self._seen.get(layer, 0), rows)

    def begin_step(self) -> None:
        """Free everything."""
        self._top.zero_()

    def expect(self, layers: Sequence[Any]) -> None:
        """The next capture is of the dispatchers ``layers``. All ranks make its memory anew."""
        self._expected, self._width = layers, 0
        self.forget()

    def hold(self) -> Callable[[], None]:
        """Keep it for the graphs that were captured, see Note [Whose memory]; returns the undo."""
        held = [one for one in [self._captured] if one and not one.memory.is_cuda]
        self.forget()
        return held.clear

    def forget(self) -> None:
        """Free the memory of a capture that failed."""
        self._captured, self._of_warmup = None, lambda: None

    @contextmanager
    def keeping(
        self, experts: nn.Module, counts: torch.Tensor, rows: int, layer: Any
    ) -> Iterator[None]:
        """Keep what ``experts`` save in the block; ``counts`` are rows of each, of ``rows``.

        ``layer`` is their dispatcher.
        """
        saved: list[_Saved] = []
        weights = [*experts.parameters()]
        parameters = {weight.data_ptr(): weight for weight in weights}
        dtypes = {weight.dtype for weight in weights}
        numbers = {weight.numel() * many for weight in weights for many in (1, len(counts))}
        sizes = {size for weight in weights for size in weight.shape}
        is_quantized = fp8_recipe() is not None
        unclear = is_quantized and rows in sizes | {len(counts)}
        if unclear:  # Scales of quantized weights may have as many rows.
            why = f"FP8 weights also have a dimension of {rows:,}, so rows cannot be told apart"
            _say_once(f"the stash keeps all that dropless experts save: {why}")
        # A pass that is computed again in a backward pass is used at once.
        if unclear or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            yield
            return

        def pack(tensor: torch.Tensor) -> Any:
            # A sharded parameter may be another tensor in the backward pass.
            parameter = parameters.get(tensor.data_ptr())
            if parameter is not None and parameter.shape == tensor.shape:
                return parameter
            tensor = tensor.detach()  # It may be a result of what saves it.
            if tensor.dtype not in dtypes and tensor.numel() in numbers:
                return tensor  # It may be a copy of weights.
            saved.append(_Saved(tensor))
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        with torch.no_grad():
            self._push(_by_storage(saved, rows, flat=not is_quantized), counts, rows, layer)

    def _push(
        self, storages: Sequence[list[_Saved]], counts: torch.Tensor, rows: int, layer: Any
    ) -> None:
        widths = [_size(one[0]) // rows for one in storages]
        if not widths:
            return
        if not self._width:
            refuse_in_graph("memory for the rows of dropless experts")
            self._choose_size(sum(widths), layer)
        buffer = self._current_buffer()
        push, before = _Push(buffer, counts), 0
        for one, width in zip(storages, widths, strict=True):
            if before + width > buffer.width:
                why = f"its rows are longer than the first layer's, {buffer.width:,} bytes"
                _say_once(f"the stash keeps all of some tensors that an MoE layer saves: {why}")
                break
            kept = _Storage(push, rows, width, before, len(one))
            tensor: Any = one[0].tensor
            columns = width // tensor.itemsize
            memory = tensor.as_strided((rows, columns), (columns, 1), 0).view(torch.uint8)
            push.move(memory, before, back=False)
            for saved in one:
                saved.tensor, saved.kept = None, kept
            before += width

    def _current_buffer(self) -> Buffer:
        in_graph = torch.cuda.is_current_stream_capturing()
        buffer = self._captured if in_graph else self._of_warmup()
        if buffer is None:
            buffer = Buffer(self.rows, self._width, self._top, self._most)
            if in_graph:
                self._captured = buffer
            else:
                self._of_warmup = ref(buffer)
        return buffer

    def _choose_size(self, width: int, layer: Any) -> None:
        """A collective call."""
        layers = self._expected or [*self._seen] or [layer]
        most = sum(self._seen.get(one, layer.average) for one in layers)
        voted = torch.tensor([most], dtype=torch.int64, device=self._top.device)
        dist.all_reduce(voted, op=dist.ReduceOp.MAX)
        self.voted = int(voted)
        self.rows = math.ceil(self.factor * self.voted / _MULTIPLE) * _MULTIPLE
        self._width = width + -width % _MULTIPLE
        size = self.rows * self._width / 2**20
        logger.info(f"rows of dropless experts are kept in {size:,.1f} MiB, {self.rows:,} rows")


def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved  # type: ignore[no-any-return]
    if saved.tensor is not None:
        return saved.tensor
    assert saved.kept is not None
    return saved.kept.restored(saved)


def _by_storage(saved: Sequence[_Saved], rows: int, *, flat: bool) -> list[list[_Saved]]:
    """Those that have ``rows`` rows, by storage; others stay as they are.

    ``flat``: a tensor of one dimension may have them one after the other.
    """
    found: dict[int, list[_Saved]] = {}
    for one in saved:
        assert one.tensor is not None
        found.setdefault(one.tensor.untyped_storage()._cdata, []).append(one)
    return [own for own in found.values() if all(_has_rows(one, rows, flat=flat) for one in own)]


def _size(saved: _Saved) -> int:
    assert saved.tensor is not None
    return saved.tensor.untyped_storage().nbytes()


def _has_rows(saved: _Saved, rows: int, *, flat: bool) -> bool:
    """Whether a storage has ``rows`` rows and nothing else, of which this is a part of each."""
    tensor: Any = saved.tensor
    columns, rest = divmod(_size(saved), rows * tensor.itemsize)
    is_float = tensor.is_floating_point()
    if rest or not (columns and tensor.dim()) or not (is_float or tensor.dtype is torch.uint8):
        return False
    if flat and is_float and tensor.dim() == 1:
        return bool(tensor.is_contiguous() and tensor.nbytes == _size(saved))
    in_row = tensor.storage_offset() < columns
    return bool(in_row and tensor.shape[0] == rows and tensor.stride(0) == columns)
