"""Gradient bucketing: gradients are copied into Megatron-FSDP's buckets many at a time.

Megatron-FSDP's gradient hook of each parameter finds the bucket, waits for a free buffer, slices it
and launches a copy: a thousand calls a step where every expert's weight is a parameter. Here the
hook only records the parameter, and one fused call copies the gradients of a complete bucket.

Note [How long a gradient may wait]
    No longer than its own unit's backward pass: it may be the static output of a CUDA graph, whose
    memory the graph of the next unit may reuse. So all waiting gradients are copied when a unit's
    backward pass ends, before its buckets are freed. That moment is known only if Megatron-FSDP
    reshards after the backward pass (``optim_grads_params``). Eager gradients that wait keep memory
    that Megatron-FSDP would have freed, so above ``WAITING_BYTES`` they are copied at once.

Note [What stays Megatron-FSDP's]
    Only the copies are made here. Then each parameter is marked as Transformer Engine marks one
    with a gradient that it wrote into the bucket itself (``grad_added_to_main_grad``), and the last
    one of a bucket is passed to Megatron-FSDP's own function. So the order and conditions of the
    reductions, scaling, and HSDP's second reduction do not change. Megatron-FSDP's root hook
    handles parameters without a gradient.

Note [Weights detached from autograd]
    Gradients of graphs arrive all at once, from ``detached_weights.py``. The own hook of such a
    weight runs only if the weight has another use. Then one part of the gradient waits in the
    weight's ``grad`` for the other part. In several buckets (as of a layer with its experts) the
    last weights come first, and a bucket before the one whose first weight is earlier: a rank that
    runs the layer eagerly, alone, completes the buckets in that order.

Note [Passes that fail]
    After a backward pass that ended in an exception, Megatron-FSDP treats the next one as a part of
    it, and reduces a bucket that was complete again with each further gradient. The result cannot
    be reproduced bit for bit, so the next forward pass raises an error.

Note [A second gradient in one pass]
    Under reentrant recompute each use of a weight is a pass of its own, and runs the weight's hook.
    Megatron-FSDP lets the last gradient overwrite the others, and reduces a complete bucket again
    for each weight that arrives, in autograd's order. Such gradients are left to it. In two cases
    it is too late for that, and the pass ends with an error: the first gradient still waits, so
    autograd has added the second one to it; or the weights are detached, so their order is another.

Note [One stream a copy]
    A hook runs on the stream of its gradient, and a copy on that stream needs no synchronization.
    The first waiting gradients set the stream. A gradient of another one (a shared expert may have
    its own) is passed to Megatron-FSDP at once, on its stream. If it is the last one of the bucket,
    the copy of the waiting gradients is ordered after their stream. The reduction is ordered only
    after the stream of the last copy, so each copy is ordered after the previous one.

Note [A buffer that is still read]
    With double buffers a unit's gradients go into the buffer from which those of the unit before
    last were reduced. Megatron-FSDP frees that buffer only on the stream of the reductions. So a
    copy on the stream of the backward pass is not ordered after the reduction that still reads it:
    if the host runs far enough ahead, the copy overwrites data that is being sent. So each copy
    waits, on the device, for the last reduction whose buffer was freed: they run in order on one
    stream, and this one was issued two units ago and has usually finished. A stream waits for each
    once. (NVIDIA/Megatron-LM#5222 is about another cause of the same overwrite.) From megatron-core
    0.20 on, this is so with ``optim_grads`` too, where the copies stay Megatron-FSDP's.
    The pipeline's queue has (event, function, bucket) of each reduction.
    ``wait_for_previous_grad_reduce`` takes reductions from its front and frees their buffers.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import WITHOUT_FAST_PATH, FastPathError, say
from megatron_cg.fastpath.gather import RELEASE, REPLACES_RELEASE
from megatron_cg.fastpath.part import NotApplicableError, find_cell
from megatron_cg.fastpath.scaled_copies import ScaledCopies, factor_of, require_kernel
from megatron_cg.fsdp.roles import HOOKS_SCOPE, fsdp_class, fsdp_function
from megatron_cg.upstream import patch

_PROCESS = "_process_post_backward_gradients"
"""Megatron-FSDP's function that takes gradients."""
_FREES = "wait_for_previous_grad_reduce"
_POOL, _POOL_OF_LARGEST = "FixedPoolAllocator", "MaxPoolAllocator"
"""The allocators of ``--fsdp-double-buffer``: a bucket uses one of two buffers that are not freed.
Those of the second may grow in the first passes. Cached views of other allocators' buffers would
keep freed memory alive."""
WAITING_BYTES = 64 << 20
"""Limit for the gradients of one bucket; about ten expert weights of a 30B-A3B MoE model."""
_TWICE = (
    "A weight got gradients twice in one backward pass, as with two uses under reentrant "
    "activation recompute. The FSDP fast path cannot process these as Megatron-FSDP does. "
    "To mend this, " + WITHOUT_FAST_PATH
)
REPLACES = (
    *fsdp_function(
        HOOKS_SCOPE + _PROCESS, "what takes gradients", "31aa215fff7f8197", "3c30337dc04e2c0b"
    ),
    *REPLACES_RELEASE,
    # Not replaced, but a user's may reduce later than parameters are marked as ready here.
    *fsdp_function("GradReducePipeline.reduce_gradients", "what reduces complete buckets"),
)
RELIES_ON = (
    *REPLACES,
    *fsdp_class("MegatronFSDP", "_params_require_handle_grad", "_root_pre_backward_hook_issued"),
    *fsdp_class("MegatronFSDP", "report_nan_in_param_grad"),
    *fsdp_class(_POOL),
    *fsdp_class("GradReducePipeline", "grad_reduce_queue", "_enforce_double_buffer_limit", _FREES),
    *fsdp_class("GradReducePipeline", "bucket_grad_ready_params"),
    *fsdp_class("DataParallelBuffer", "temporary_bucket_allocator", "is_data_distributed"),
    *fsdp_class("DataParallelBuffer", "param_idx", "get_item_from_bucket", "fetch_bucket"),
    *fsdp_class("ParamAndGradBuffer", "double_buf_units", "param_to_param_group"),
    *fsdp_class("ParameterGroup", "hfsdp_helper_gbuf", "main_grad_buffer", "requires_grad"),
    *fsdp_class("ParameterGroup", "params", "fsdp_unit_id"),
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

        return patch.replace_function(self._pipeline, _FREES, wait_for_previous_grad_reduce)

    def make_room(self, bucket: int, stream: int) -> None:
        """Let Megatron-FSDP free a buffer; then ``stream``, the current one, may write to it."""
        self._pipeline._enforce_double_buffer_limit([bucket])
        if self._last is not None and stream not in self._waited:
            self._last.wait()
            self._waited.add(stream)


def order_copies(fsdp: Any) -> patch.Undo:
    """Let Megatron-FSDP's own copies wait; see Note [A buffer that is still read]."""
    store = fsdp.param_and_grad_buffer
    cell, freed = find_cell(fsdp, _PROCESS), FreedBuffers(fsdp.grad_reduce_pipeline)
    original: Callable[[list[nn.Parameter]], None] = cell.cell_contents

    def process(parameters: list[nn.Parameter]) -> None:
        stream = current_stream()
        for number in {store.param_to_param_group[parameter] for parameter in parameters}:
            freed.make_room(number, stream)
        original(parameters)

    replaced = patch.replace_function(cell, patch.IN_CELL, process)
    return patch.combine_undos((replaced, freed.install()))


@dataclass
class Bucket:
    """A bucket of a unit, and its gradients that wait to be copied."""

    number: int
    gradients: Any
    """Megatron-FSDP's buffer of gradients."""
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
    _place: tuple[int, int] | None = None
    _views: dict[int, torch.Tensor] = field(default_factory=dict)

    def views(self, memory: Any, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Views of ``memory``, as Megatron-FSDP fetches the bucket, in the parameters' shapes.

        They are cached as long as it is the same memory. Storages tell, and not addresses: a view
        keeps its storage alive, so no new storage can be mistaken for it.
        """
        place = (memory.data.untyped_storage()._cdata, memory.data.storage_offset())
        if place != self._place:
            self._place = place
            buffer = self.gradients
            cut, items = buffer.get_item_from_bucket, buffer.param_idx
            self._views = {id(p): cut(memory, items[p]).view(p.shape) for p in buffer.params}
        return [self._views[id(parameter)] for parameter in parameters]

    def complete_with(self, more: int) -> bool:
        return self.handed_over + len(self.waiting) + more == self.size

    def begin(self, backward: object) -> None:
        """Reset the bucket if ``backward`` is a new backward pass."""
        if self.backward is not backward:
            self.backward, self.handed_over, self.copied_on = backward, 0, None
            self.waiting, self.waiting_bytes = [], 0


class Operation:
    """One operation's weights, whose gradients arrive at once, and the bucket of each.

    Each check runs for every expert of every layer, so it must be cheap.
    """

    def __init__(self, weights: list[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self.weights, self.all = weights, frozenset(weights)
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(buckets):
            places.setdefault(bucket.number, []).append(place)
        # An eager pass reaches the last weights first, so a bucket is complete with its first one.
        ordered = sorted(places.values(), reverse=True)
        self.slices = [BucketSlice(buckets[at[0]], [weights[i] for i in at], at) for at in ordered]
        """By bucket, in the order in which an eager pass completes the buckets."""

    def plain(self, gradients: Sequence[torch.Tensor | None]) -> list[list[Any]] | None:
        """The gradients of each slice if they only need to be copied, else None.

        They have the shapes and dtypes of the weights, as a graph's all have.
        """
        weights: Sequence[Any] = self.weights
        has_more = any(one.grad is not None or one.grad_added_to_main_grad for one in weights)
        if has_more or any(gradient is None for gradient in gradients):
            return None
        return [[gradients[place] for place in one.places] for one in self.slices]


class BucketSlice:
    """Weights of one operation that share a bucket, and their ``places`` in the operation."""

    def __init__(self, bucket: Bucket, weights: list[nn.Parameter], places: list[int]) -> None:
        self.bucket, self.weights, self.places = bucket, weights, places
        self.others = frozenset(weights[:-1])
        scales = len(weights) == bucket.size and len({weight.dtype for weight in weights}) == 1
        self.scaled_copies = ScaledCopies() if scales else None


class GradientBucketing:
    """Replaces ``original``, Megatron-FSDP's gradient function, under ``optim_grads_params``."""

    def __init__(self, fsdp: Any, original: Callable[[list[nn.Parameter]], None]) -> None:
        self._fsdp, self._original = fsdp, original
        self.freed = FreedBuffers(fsdp.grad_reduce_pipeline)
        self._buckets: list[Bucket] = []
        self._of_parameter: dict[int, Bucket] = {}
        self._buckets_of: dict[nn.Module, list[Bucket]] = {}
        self._detached: dict[int, Callable[[], bool]] = {}
        self._partial: dict[int, nn.Parameter] = {}
        """Detached weights that have one part of their gradient and wait for the other part."""
        self.scales = False
        """Whether copies of whole buckets scale; see ``scaled_copies.py``."""
        for number, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
            self._add(number, group)

    def scale_copies(self) -> patch.Undo:
        """Scale whole buckets in their copies. Raises NotApplicableError without the kernel."""
        for bucket in self._buckets[:1]:
            require_kernel(bucket.gradients.data)
        return patch.set_attribute(self, "scales", True)

    def knows(self, parameter: object) -> bool:
        return id(parameter) in self._of_parameter

    def detach(self, weights: Sequence[nn.Parameter], to_come: Callable[[], bool]) -> Operation:
        """Detach an operation's ``weights`` from autograd; :meth:`knows` is true for each.

        ``to_come`` returns whether this backward pass has yet to reach the operation.
        """
        self._detached.update(dict.fromkeys(map(id, weights), to_come))
        return Operation(list(weights), [self._of_parameter[id(weight)] for weight in weights])

    def attach(self, operation: Operation) -> None:
        """Undo :meth:`detach`: only the weights' own hooks take their gradients again."""
        for weight in operation.weights:
            self._detached.pop(id(weight), None)

    def take_detached(
        self, operation: Operation, gradients: list[torch.Tensor | None], used: Sequence[bool]
    ) -> None:
        """Take gradients of detached weights, on the stream on which they are computed.

        ``operation`` is what :meth:`detach` returned for the weights. Gradients are in their order
        and dtype, in a graph's own memory, where none may wait. ``used`` says for each weight
        whether this backward pass also reaches its own hook.
        """
        expected = self._fsdp._params_require_handle_grad
        is_usual = not any(used) and expected >= operation.all
        if is_usual and (plain := operation.plain(gradients)) is not None:
            for bucket_slice, copied in zip(operation.slices, plain, strict=True):
                self._hand_over_at_once(bucket_slice, copied)
            return
        in_order = list(zip(operation.weights, gradients, used, strict=True))
        if len(operation.slices) > 1:
            in_order.reverse()  # See Note [Weights detached from autograd].
        for weight, gradient, also in in_order:
            if gradient is not None and weight.grad is not None:
                weight.grad = weight.grad + gradient
            elif gradient is not None:
                weight.grad = gradient.clone()
            if also and self._partial.pop(id(weight), None) is None:
                # Autograd adds the other part, and the weight's own hook gets the sum.
                self._partial[id(weight)] = weight
            else:
                own = self._of_parameter[id(weight)]
                if weight not in expected and len(self._ready(own)) == own.size:
                    raise FastPathError(say(_TWICE))
                self._take(weight, own)

    def refuse_what_is_left(self) -> None:
        """Raise FastPathError if a backward pass did not finish; see Note [Passes that fail]."""
        if not self._fsdp._root_pre_backward_hook_issued:
            return
        ready = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params
        if self._partial or any(ready) or any(bucket.waiting for bucket in self._buckets):
            raise FastPathError(
                "A backward pass raised an exception, and only a part of its gradients is in their "
                "buckets. Megatron-FSDP would add them to those of the next pass, some of them "
                "more than once. Start again from the last checkpoint."
            )

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        """Take these parameters' gradients, at once or when their bucket is complete."""
        for parameter in parameters:
            bucket = self._of_parameter.get(id(parameter))
            if bucket is None:
                self._original([parameter])
            elif id(parameter) not in self._detached or self._is_whole(parameter):
                self._take(parameter, bucket)

    def _is_whole(self, weight: nn.Parameter) -> bool:
        """Whether a detached weight has its full gradient when its own hook runs."""
        if self._detached[id(weight)]():
            self._partial[id(weight)] = weight
            return False
        expected = self._fsdp._params_require_handle_grad
        if self._partial.pop(id(weight), None) is None and weight not in expected:
            raise FastPathError(
                "A weight of a graph got a gradient from another use after its gradient was put "
                "into its bucket, so the sum would be incomplete. Either the weight got another "
                "AccumulateGrad node, or it is used again under reentrant activation recompute. "
                "To mend this, " + say(WITHOUT_FAST_PATH)
            )
        return True

    def _take(self, parameter: Any, bucket: Bucket) -> None:
        bucket.begin(self._fsdp._params_require_handle_grad)
        if parameter not in self._fsdp._params_require_handle_grad:
            self._leave(parameter, bucket)  # See Note [A second gradient in one pass].
            return
        stream, gradient = current_stream(), parameter.grad
        on_another = bool(bucket.waiting) and bucket.stream != stream
        # A user's hook after ours would find no gradient to change.
        has_hook = len(parameter._post_accumulate_grad_hooks or ()) > 1
        if gradient is None or on_another or has_hook or parameter.grad_added_to_main_grad:
            self._leave(parameter, bucket)
            bucket.handed_over += 1
        else:
            bucket.waiting.append(parameter)
            bucket.waiting_bytes += gradient.nbytes
            bucket.stream = stream
        if bucket.waiting and (bucket.complete_with(0) or bucket.waiting_bytes > WAITING_BYTES):
            self._hand_over_waiting(bucket)

    def _leave(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        self._make_room(bucket)
        self._original([parameter])

    def _make_room(self, bucket: Bucket) -> None:
        """Runs before each copy into ``bucket``; see Note [One stream a copy]."""
        stream = current_stream()
        self.freed.make_room(bucket.number, stream)
        if bucket.copied_on is not None and bucket.copied_on != stream:
            wait_for(bucket.copied_on, ())
        bucket.copied_on = stream

    def unit_is_done(self, unit: nn.Module) -> None:
        """Copy the waiting gradients of ``unit``; see Note [How long a gradient may wait]."""
        if unit not in self._buckets_of:
            own = (self._of_parameter.get(id(p)) for p in unit.parameters())
            self._buckets_of[unit] = list({b.number: b for b in own if b is not None}.values())
        for bucket in self._buckets_of[unit]:
            bucket.begin(self._fsdp._params_require_handle_grad)
            if bucket.waiting:
                self._hand_over_waiting(bucket)

    def _add(self, number: int, group: Any) -> None:
        buffer = group.hfsdp_helper_gbuf or group.main_grad_buffer
        if group.fsdp_unit_id is None or not group.requires_grad or buffer is None:
            return
        pooled = type(buffer.temporary_bucket_allocator).__name__ in (_POOL, _POOL_OF_LARGEST)
        # An unsharded buffer is its own bucket and is allocated once.
        if not pooled and buffer.is_data_distributed:
            return
        # Gradients that are shared, or computed after the backward pass of their unit.
        others = ("_is_shared", "skip_backward_post_hook")
        if any(getattr(parameter, name, False) for parameter in group.params for name in others):
            return
        bucket = Bucket(number, buffer, len(group.params))
        self._buckets.append(bucket)
        self._of_parameter.update(dict.fromkeys(map(id, group.params), bucket))

    def _hand_over_waiting(self, bucket: Bucket) -> None:
        waiting, bucket.waiting, bucket.waiting_bytes = bucket.waiting, [], 0
        gradients: list[Any] = [parameter.grad for parameter in waiting]
        if len(set(map(id, waiting))) < len(waiting):
            raise FastPathError(say(_TWICE))
        wait_for(bucket.stream, gradients)
        self._copy(bucket, waiting, gradients)
        for parameter in waiting:
            parameter.grad = None
        self._tell(bucket, waiting[:-1], waiting[-1])

    def _hand_over_at_once(self, bucket_slice: BucketSlice, gradients: list[Any]) -> None:
        bucket = bucket_slice.bucket
        bucket.begin(self._fsdp._params_require_handle_grad)
        if bucket.complete_with(len(bucket_slice.weights)) and bucket.waiting:
            self._hand_over_waiting(bucket)
        scaled = bucket_slice.scaled_copies if self.scales and not bucket.handed_over else None
        factor = self._copy(bucket, bucket_slice.weights, gradients, scaled)
        if factor is not None:  # Megatron-FSDP reduces the bucket as it is.
            bucket.gradients.gradient_scaling_factor = None
        try:
            self._tell(bucket, bucket_slice.others, bucket_slice.weights[-1])
        finally:
            if factor is not None:
                bucket.gradients.gradient_scaling_factor = factor

    @torch.no_grad()
    def _copy(
        self,
        bucket: Bucket,
        weights: list[nn.Parameter],
        gradients: list[torch.Tensor],
        scaled: ScaledCopies | None = None,
    ) -> float | None:
        """Copy gradients; returns by what they were scaled, if all of a bucket may be scaled."""
        self._make_room(bucket)
        buffer, store = bucket.gradients, self._fsdp.param_and_grad_buffer
        # No other rank has a part of a buffer that is not distributed; it accumulates all
        # microbatches of the step.
        sums = not buffer.is_data_distributed
        dtype = None if sums else store.mp_policy.grad_comm_dtype
        pieces = bucket.views(buffer.fetch_bucket(dtype=dtype), weights)
        if scaled is not None:
            factor = factor_of(store, bucket.number, buffer, pieces[0].dtype)
            if factor is not None and scaled.copy(pieces, gradients, factor, sums=sums):
                return factor
        (torch._foreach_add_ if sums else torch._foreach_copy_)(pieces, gradients)
        return None

    def _ready(self, bucket: Bucket) -> set[nn.Parameter]:
        """Megatron-FSDP's own set of parameters in the bucket, until it is reduced and freed."""
        of_bucket = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params
        return of_bucket[bucket.number]  # type: ignore[no-any-return]

    def _tell(self, bucket: Bucket, others: Collection[nn.Parameter], last: Any) -> None:
        """Tell Megatron-FSDP that these gradients are in their bucket."""
        bucket.handed_over += len(others) + 1
        ready = self._ready(bucket)
        ready.update(others)
        self._fsdp._params_require_handle_grad.difference_update(others)
        if len(ready) + 1 < bucket.size:
            # Megatron-FSDP's own function would find nothing to reduce yet.
            ready.add(last)
            self._fsdp._params_require_handle_grad.discard(last)
            return
        last.grad_added_to_main_grad = True
        self._original([last])


def install_gradients(fsdp: Any) -> tuple[GradientBucketing, Callable[[], None]]:
    """Replace Megatron-FSDP's gradient function; returns the replacement and the undo.

    Raises NotApplicableError if gradients must be taken one by one, and UpstreamChangedError if a
    function is gone; nothing is changed then.
    """
    strategy = fsdp.data_parallel_sharding_strategy
    if strategy != "optim_grads_params":
        why = f"the sharding strategy is {strategy}, in which no hook tells that a unit's backward"
        raise NotApplicableError(f"{why} pass is done")
    if fsdp.report_nan_in_param_grad:
        raise NotApplicableError("each gradient is checked for NaN by itself")
    cell, releasing = find_cell(fsdp, _PROCESS), find_cell(fsdp, RELEASE)
    bucketing, release = GradientBucketing(fsdp, cell.cell_contents), releasing.cell_contents

    def release_module_parameters(module: nn.Module, bwd: bool, *lazy: Any, **named: Any) -> None:
        if bwd:
            bucketing.unit_is_done(module)
        release(module, bwd, *lazy, **named)

    with ExitStack() as undo:
        undo.callback(patch.replace_function(cell, patch.IN_CELL, bucketing))
        undo.callback(patch.replace_function(releasing, patch.IN_CELL, release_module_parameters))
        undo.callback(bucketing.freed.install())
        undo.callback(patch.wrap_method(fsdp, "forward", before=bucketing.refuse_what_is_left))
        return bucketing, undo.pop_all().close
