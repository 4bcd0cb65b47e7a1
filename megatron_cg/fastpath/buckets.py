"""A bucket of gradients: what fills it, its memory, and the streams that use it.

Note [A buffer that is still read]
    With double buffers a unit's gradients go into the buffer from which those of the unit before
    last were reduced. Megatron-FSDP frees that buffer only on the stream of the reductions. So a
    copy on the stream of the backward pass is not ordered after the reduction that still reads the
    buffer. If the host runs far enough ahead, the copy overwrites data that is being sent. So each
    copy waits, on the device, for the last reduction whose buffer was freed by any call. Reductions
    run in order on one stream, so waiting for the last one is enough. It was issued two units ago
    and has usually finished. A stream waits for each reduction once.
    (NVIDIA/Megatron-LM#5222 is about another cause of the same overwrite.) From megatron-core 0.20
    on, this is so with ``optim_grads`` too, where the copies stay Megatron-FSDP's.
    The pipeline's queue has (event, function, bucket) of each reduction.
    ``wait_for_previous_grad_reduce`` takes reductions from its front and frees their buffers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath.part import find_cell, hook_functions
from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.upstream.patch import Undo, all_of, put_over, put_over_cell

PROCESS = "_process_post_backward_gradients"
"""Megatron-FSDP's function that takes gradients."""

_FREES = "wait_for_previous_grad_reduce"
_POOL, _POOL_OF_LARGEST = "FixedPoolAllocator", "MaxPoolAllocator"
"""The allocators of ``--fsdp-double-buffer``: a bucket uses one of two buffers that are not freed.
Those of the second may grow in the first passes. Cached views of other allocators' buffers would
keep freed memory alive."""
RELIES_ON = (
    *fsdp_class(_POOL),
    *fsdp_class("DataParallelBuffer", "temporary_bucket_allocator", "is_data_distributed"),
    *fsdp_class("DataParallelBuffer", "param_idx", "get_item_from_bucket"),
    *fsdp_class("GradReducePipeline", "grad_reduce_queue", "_enforce_double_buffer_limit", _FREES),
    *fsdp_class("ParamAndGradBuffer", "double_buf_units", "param_to_param_group"),
)


def current_stream() -> int:
    """The raw handle of the device's current stream; 0 without a GPU.

    ``torch.cuda.current_stream`` creates an object in each call and costs twenty times as much.
    """
    if torch.cuda.is_initialized():
        return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return 0


def wait_for(stream: int, tensors: Iterable[torch.Tensor]) -> None:
    """Let the current stream use ``tensors`` that were computed on another one, by raw handle.

    The current stream waits for it, and their memory is not reused until the current one is done.
    """
    if stream != current_stream():
        current = torch.cuda.current_stream()
        current.wait_stream(torch.cuda.ExternalStream(stream))
        for tensor in tensors:
            tensor.record_stream(current)


def stays(buffer: Any) -> bool:
    pooled = type(buffer.temporary_bucket_allocator).__name__ in (_POOL, _POOL_OF_LARGEST)
    # An unsharded buffer is its own bucket and is allocated once.
    return pooled or not buffer.is_data_distributed


class BucketViews:
    """Views of one bucket, in the parameters' shapes.

    They are cached as long as the bucket is the same memory. The check compares storages and not
    addresses: a view keeps its storage alive, so no new storage can be mistaken for it.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._place: tuple[int, int] | None = None
        self._views: dict[int, torch.Tensor] = {}

    def of(self, bucket: Any, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        place = (bucket.data.untyped_storage()._cdata, bucket.data.storage_offset())
        if place != self._place:
            self._place = place
            self._views = {id(p): self._cut(bucket, p) for p in self._buffer.params}
        return [self._views[id(parameter)] for parameter in parameters]

    def _cut(self, bucket: Any, parameter: nn.Parameter) -> torch.Tensor:
        item = self._buffer.param_idx[parameter]
        piece: torch.Tensor = self._buffer.get_item_from_bucket(bucket, item)
        return piece.view(parameter.shape)


class FreedBuffers:
    """Finds the reduction that a copy must wait for; see Note [A buffer that is still read]."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._last: Any = None
        """The event of the last reduction whose buffer was freed."""
        self._waited: set[int] = set()
        """Streams that have waited for it, by raw handle."""

    def install(self) -> Callable[[], None]:
        """Record each reduction whose buffer is freed; returns the undo."""
        original = getattr(self._pipeline, _FREES)

        def wait_for_previous_grad_reduce(*args: Any, **kwargs: Any) -> None:
            queue = self._pipeline.grad_reduce_queue
            before = list(queue)
            original(*args, **kwargs)
            freed = len(before) - len(queue)
            if freed:
                self._last, _, _ = before[freed - 1]
                self._waited.clear()

        return put_over(self._pipeline, _FREES, wait_for_previous_grad_reduce)

    def make_room(self, bucket: int, stream: int) -> None:
        """Let Megatron-FSDP free a buffer; then ``stream``, the current one, may write to it."""
        self._pipeline._enforce_double_buffer_limit([bucket])
        if self._last is not None and stream not in self._waited:
            self._last.wait()
            self._waited.add(stream)


def order_copies(fsdp: Any) -> Undo:
    """Let Megatron-FSDP's own copies wait; see Note [A buffer that is still read]."""
    store = fsdp.param_and_grad_buffer
    cell, freed = find_cell(hook_functions(fsdp), PROCESS), FreedBuffers(fsdp.grad_reduce_pipeline)
    original: Callable[[list[nn.Parameter]], None] = cell.cell_contents

    def process(parameters: list[nn.Parameter]) -> None:
        stream = current_stream()
        for number in {store.param_to_param_group[parameter] for parameter in parameters}:
            freed.make_room(number, stream)
        original(parameters)

    return all_of((put_over_cell(cell, process), freed.install()))


@dataclass
class Bucket:
    """A bucket of a unit, and its gradients that wait to be copied."""

    number: int
    gradients: Any
    """Megatron-FSDP's buffer of gradients."""
    views: BucketViews
    size: int
    """Number of parameters that need a gradient."""
    waiting: list[nn.Parameter] = field(default_factory=list)
    waiting_bytes: int = 0
    handed_over: int = 0
    """Number of gradients taken in this backward pass, without ``waiting``."""
    backward: object = None
    """Megatron-FSDP's set of parameters in the backward pass that ``waiting`` belongs to."""
    stream: int = 0
    """The stream on which the waiting gradients were computed."""
    copied_on: int | None = None
    """The stream of the last copy in this backward pass; all other copies come before it."""

    def complete_with(self, more: int) -> bool:
        return self.handed_over + len(self.waiting) + more == self.size

    def begin(self, backward: object) -> None:
        """Reset the bucket if ``backward`` is a new backward pass."""
        if self.backward is not backward:
            self.backward, self.handed_over, self.copied_on = backward, 0, None
            self.waiting, self.waiting_bytes = [], 0


class Together:
    """Weights of one operation, whose gradients arrive at once, and the bucket of each.

    Each check runs for every expert of every layer, so it must be cheap.
    """

    def __init__(self, weights: list[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self.weights, self.all = weights, frozenset(weights)
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(buckets):
            places.setdefault(bucket.number, []).append(place)
        # An eager pass reaches the last weights first, so a bucket is complete with its first one.
        ordered = sorted(places.values(), reverse=True)
        self.parts = [OfBucket(buckets[at[0]], [weights[i] for i in at], at) for at in ordered]
        """By bucket, in the order in which an eager pass completes the buckets."""

    def plain(self, gradients: Sequence[torch.Tensor | None]) -> list[list[Any]] | None:
        """The gradients of each part if they only need to be copied, else None."""
        by_part = [[gradients[place] for place in part.places] for part in self.parts]
        if all(part.are_plain(own) for part, own in zip(self.parts, by_part, strict=True)):
            return by_part
        return None


class OfBucket:
    """Weights of one operation that share a bucket, and their ``places`` in the operation."""

    def __init__(self, bucket: Bucket, weights: list[nn.Parameter], places: list[int]) -> None:
        self.bucket, self.weights, self.places = bucket, weights, places
        self.others = frozenset(weights[:-1])
        """All weights but the last one."""
        self._shapes = [weight.shape for weight in weights]
        self._dtype = weights[0].dtype

    def are_plain(self, gradients: Sequence[Any]) -> bool:
        if any(gradient is None for gradient in gradients):
            return False
        weights: Sequence[Any] = self.weights
        return (
            [gradient.shape for gradient in gradients] == self._shapes
            and all(gradient.dtype is self._dtype for gradient in gradients)
            and all(weight.grad is None for weight in weights)
            and not any(weight.grad_added_to_main_grad for weight in weights)
        )
