"""Gradients handed to Megatron-FSDP's buckets many at a time.

Megatron-FSDP runs its gradient hook once a parameter: find the bucket, wait for a free buffer,
slice it, launch one copy, ask whether the bucket is complete. With every expert's weight a
parameter these are a thousand calls a step. Here the hook only notes the parameter, and the
gradients of a bucket are copied by one fused call, once they have all come.

Note [How long a gradient may wait]
    Not past its own unit's backward pass: the gradient may be the static output of a CUDA graph,
    whose memory the graph of the next unit is free to use. So whatever still waits is handed over
    when a unit's backward pass is done, before its buckets are freed. That is known only where
    Megatron-FSDP reshards after the backward pass (``optim_grads_params``); with the other
    strategies its own hook stays.
    And not in great number: eager gradients that wait are memory that Megatron-FSDP would have
    freed. Above ``WAITING_BYTES`` they are handed over at once.

Note [What stays Megatron-FSDP's]
    Only the copies are made here. A parameter whose gradient lies in its bucket is then presented
    the way Transformer Engine presents one that it wrote there itself
    (``grad_added_to_main_grad``), the last one of a bucket to Megatron-FSDP's own function: order
    and conditions of the reductions, scaling, HSDP's second reduction are as they were. A
    parameter that gets no gradient is left to its root hook, which looks after all that are left.

Note [Weights that autograd does not see]
    Gradients of grouped GEMMs and graphs come all at once, from ``detached_weights.py``. Their
    weights' own hooks run only where a weight is used in another way too, and then the two parts
    wait for each other here, in the weight's ``grad``. Of several buckets, as of a layer with its
    experts, the last weights go first: a rank that runs the layer eagerly, alone, comes to them in
    that order.

Note [Passes that fail]
    After a backward pass that ended in an exception Megatron-FSDP takes the next one for a part of
    it, and with the first gradient of a bucket that was complete reduces it as it is, and with
    each further one again. What comes of that has no meaning and cannot be had bit for bit, so the
    next forward pass refuses to begin.

Note [A second gradient in one pass]
    Under reentrant recompute each use of a weight is a pass of its own, and its hook runs for each.
    Megatron-FSDP lets the last gradient overwrite the others, or, with a bucket that is complete,
    reduces it again for each weight that comes, in autograd's order. Such gradients are left to it,
    and where it is too late for that (the first one waits, so autograd has added the second one to
    it, or hidden weights come, whose order is another) the pass ends with an error.

Note [One stream a copy]
    A hook runs on the stream of its gradient, and a copy made there needs no waiting. Gradients of
    several streams (a shared expert may have its own) are not copied together: the first ones to
    wait decide, and one from elsewhere takes Megatron-FSDP's way at once, on its own stream. If it
    was the last to come, the copy of those that waited is ordered after their stream. The reduction
    comes after the stream of the last copy only, so each copy comes after the one before.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1: ``_process_post_backward_gradients`` of
``_register_fsdp_hooks``; ``MegatronFSDP._params_require_handle_grad`` (a new set in each backward
pass), ``_root_pre_backward_hook_issued`` (in a pass) and ``report_nan_in_param_grad``;
``GradReducePipeline.bucket_grad_ready_params``; ``DataParallelBuffer.fetch_bucket``,
``get_item_from_bucket``, ``param_idx`` and ``is_data_distributed`` (false where a data-parallel
group is one rank, as that of experts may be); ``ParameterGroup.hfsdp_helper_gbuf``,
``main_grad_buffer``, ``requires_grad``, ``params`` and ``fsdp_unit_id``;
``mp_policy.grad_comm_dtype``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.gradients.buckets import Bucket, Together
from megatron_cg.fastpath.gradients.reduce_buffers import FreedBuffers
from megatron_cg.fastpath.gradients.streams import current_stream, wait_for
from megatron_cg.fastpath.gradients.views import BucketViews, in_one_piece
from megatron_cg.fastpath.hook_closures import find_cell, hook_functions, hooks_of_gradient
from megatron_cg.fsdp.fsdp_symbols import in_both
from megatron_cg.upstream.closures import put_over_cell
from megatron_cg.upstream.patch import run_before

WAITING_BYTES = 64 << 20
"""Of gradients of one bucket; some ten of the experts of a 30B-A3B MoE model."""
_PROCESS = "_process_post_backward_gradients"
_TWICE = (
    "A weight got gradients twice in one backward pass, as in two uses under reentrant activation "
    "recompute, and the FSDP fast path cannot do with them what Megatron-FSDP does. "
    "Type --cg-no-fsdp-fast-path, or in Python fast_path=False."
)
REPLACES = in_both(
    f"megatron_fsdp:MegatronFSDP._register_fsdp_hooks.<locals>.{_PROCESS}",
    "what takes gradients",
    fingerprints=("31aa215fff7f8197",),
)
RELIES_ON = (
    *REPLACES,
    *in_both(
        "megatron_fsdp:MegatronFSDP",
        "the wrapped model",
        attributes=(
            "_params_require_handle_grad",
            "_root_pre_backward_hook_issued",
            "report_nan_in_param_grad",
            "mp_policy",
        ),
    ),
    *in_both(
        "param_and_grad_buffer:GradReducePipeline",
        "what reduces gradients",
        attributes=("bucket_grad_ready_params",),
    ),
    *in_both(
        "param_and_grad_buffer:DataParallelBuffer",
        "one kind of gradients",
        attributes=("fetch_bucket", "get_item_from_bucket", "param_idx", "is_data_distributed"),
    ),
    *in_both(
        "param_and_grad_buffer:ParameterGroup",
        "parameters in one bucket",
        attributes=(
            "hfsdp_helper_gbuf",
            "main_grad_buffer",
            "requires_grad",
            "params",
            "fsdp_unit_id",
        ),
    ),
)


class GradientBucketing:
    """Replaces Megatron-FSDP's gradient function for one model.

    Args:
        fsdp: the ``MegatronFSDP``; its strategy is ``optim_grads_params``.
        original: its own function, taking a list of parameters.
    """

    def __init__(self, fsdp: Any, original: Callable[[list[nn.Parameter]], None]) -> None:
        self._fsdp, self._original = fsdp, original
        self.freed = FreedBuffers(fsdp.grad_reduce_pipeline)
        self._buckets: list[Bucket] = []
        self._of_parameter: dict[int, Bucket] = {}
        self._unit_of_module: dict[nn.Module, list[Bucket]] = {}
        self._hidden: dict[int, Callable[[], bool]] = {}
        self._parts: dict[int, nn.Parameter] = {}
        """Hidden weights that have a part of their gradient, and wait for the other."""
        self.copies = 0
        """Fused copies so far."""
        for number, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
            self._add(number, group)

    def knows(self, parameter: object) -> bool:
        """Whether its gradient is handed over here."""
        return id(parameter) in self._of_parameter

    def hide(self, weights: Sequence[nn.Parameter], to_come: Callable[[], bool]) -> Together:
        """Let known ``weights`` be hidden from autograd.

        Args:
            weights: of one operation, each once.
            to_come: whether this backward pass has still to come to the operation.
        """
        self._hidden.update(dict.fromkeys(map(id, weights), to_come))
        buckets = {id(found): found for found in (self._of_parameter[id(w)] for w in weights)}
        return Together(list(weights), next(iter(buckets.values())) if len(buckets) == 1 else None)

    def show(self, together: Together) -> None:
        """Let the own hooks of these weights be all that there is again."""
        for weight in together.weights:
            self._hidden.pop(id(weight), None)

    def take_hidden(
        self,
        together: Together,
        gradients: list[torch.Tensor | None],
        used: Sequence[bool],
        *,
        lent: bool = False,
    ) -> None:
        """Take gradients that autograd did not see, on the stream that they are computed on.

        Args:
            together: what ``hide`` returned for their weights.
            gradients: theirs, in their order and dtype.
            used: whether this backward pass comes to a weight's own hook too.
            lent: whether they lie in a graph's own memory, where none may wait.
        """
        expected = self._fsdp._params_require_handle_grad
        bucket = together.bucket
        if (
            bucket is not None
            and not any(used)
            and expected >= together.all
            and not self._fsdp.report_nan_in_param_grad
            and together.are_plain(gradients)
        ):
            self._hand_over_at_once(bucket, together, gradients)
            return
        parts = list(zip(together.weights, gradients, used, strict=True))
        # See Note [Weights that autograd does not see].
        for weight, gradient, also in parts if bucket is not None else reversed(parts):
            if gradient is not None and weight.grad is not None:
                weight.grad = weight.grad + gradient
            elif gradient is not None:
                weight.grad = gradient.clone() if lent else gradient
            if also and self._parts.pop(id(weight), None) is None:
                # Autograd adds the rest, and the weight's own hook finds the sum.
                self._parts[id(weight)] = weight
            else:
                own = self._of_parameter[id(weight)]
                if weight not in expected and len(self._ready(own)) == own.size:
                    raise FastPathError(_TWICE)
                self._take(weight, own)

    def refuse_what_is_left(self) -> None:
        """Raise FastPathError where a backward pass did not end; see Note [Passes that fail]."""
        if not self._fsdp._root_pre_backward_hook_issued:
            return
        ready = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params
        if self._parts or any(ready) or any(bucket.waiting for bucket in self._buckets):
            raise FastPathError(
                "A backward pass ended in an exception and left gradients half handed over. "
                "Megatron-FSDP would add them to those of the next pass, some of them more than "
                "once. Start again from the last checkpoint."
            )

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        """Take these parameters' gradients, now or when those of their bucket have come."""
        for parameter in parameters:
            bucket = self._of_parameter.get(id(parameter))
            if bucket is None:
                self._original([parameter])
            elif id(parameter) not in self._hidden or self._is_whole(parameter):
                self._take(parameter, bucket)

    def _is_whole(self, weight: nn.Parameter) -> bool:
        """Whether a hidden weight has all of its gradient, as its own hook runs."""
        if self._hidden[id(weight)]():
            self._parts[id(weight)] = weight
            return False
        if self._parts.pop(id(weight), None) is None and (
            weight not in self._fsdp._params_require_handle_grad
        ):
            raise FastPathError(
                "A weight of a graph or a grouped GEMM got a gradient from another use after that "
                "of the graph or GEMM was handed over, so its gradient would lack a part: the "
                "weight was given another AccumulateGrad node, or is used again under reentrant "
                "activation recompute. Type --cg-no-fsdp-fast-path, or in Python fast_path=False."
            )
        return True

    def _take(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        self._begin(bucket)
        if parameter not in self._fsdp._params_require_handle_grad:
            self._leave(parameter, bucket)  # See Note [A second gradient in one pass].
            return
        stream = current_stream()
        gradient = parameter.grad
        if gradient is None or self._is_special(parameter) or bucket.waits_on_another(stream):
            self._leave(parameter, bucket)
            bucket.handed_over += 1
        else:
            bucket.waiting.append(parameter)
            bucket.waiting_bytes += gradient.nbytes
            bucket.stream = stream
        if bucket.waiting and (bucket.complete_with(0) or bucket.waiting_bytes > WAITING_BYTES):
            self._hand_over_waiting(bucket)

    def _leave(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Let Megatron-FSDP copy a gradient into ``bucket``."""
        self._make_room(bucket)
        self._original([parameter])

    def _make_room(self, bucket: Bucket) -> None:
        """Before each copy into ``bucket``; see Note [One stream a copy]."""
        stream = current_stream()
        self.freed.make_room(bucket.number, stream)
        if bucket.copied_on is not None and bucket.copied_on != stream:
            wait_for(bucket.copied_on, ())
        bucket.copied_on = stream

    def unit_is_done(self, unit: nn.Module) -> None:
        """Hand over what still waits of ``unit``; see Note [How long a gradient may wait]."""
        buckets = self._unit_of_module.get(unit)
        if buckets is None:
            buckets = self._unit_of_module[unit] = self._buckets_of(unit)
        for bucket in buckets:
            self._begin(bucket)
            if bucket.waiting:
                self._hand_over_waiting(bucket)

    def _add(self, number: int, group: Any) -> None:
        buffer = group.hfsdp_helper_gbuf or group.main_grad_buffer
        if group.fsdp_unit_id is None or not group.requires_grad or buffer is None:
            return
        if any(getattr(parameter, "_is_shared", False) for parameter in group.params):
            return
        bucket = Bucket(number, buffer, BucketViews(buffer), len(group.params))
        self._buckets.append(bucket)
        for parameter in group.params:
            self._of_parameter[id(parameter)] = bucket

    def _buckets_of(self, unit: nn.Module) -> list[Bucket]:
        found = (self._of_parameter.get(id(p)) for p in unit.parameters())
        return list({bucket.number: bucket for bucket in found if bucket is not None}.values())

    def _is_special(self, parameter: nn.Parameter) -> bool:
        """Whether Megatron-FSDP does more than to copy, or something else."""
        target: Any = parameter
        return bool(
            target.grad_added_to_main_grad
            or getattr(target, "skip_backward_post_hook", False)
            or self._fsdp.report_nan_in_param_grad
            # A hook of the user's that comes after ours finds no gradient, and so changes none.
            or len(hooks_of_gradient(parameter)) > 1
        )

    def _begin(self, bucket: Bucket) -> None:
        """Forget what an earlier backward pass left to its root hook."""
        now = self._fsdp._params_require_handle_grad
        if bucket.backward is not now:
            bucket.begin(now)

    def _hand_over_waiting(self, bucket: Bucket) -> None:
        waiting, bucket.waiting, bucket.waiting_bytes = bucket.waiting, [], 0
        gradients = [p.grad for p in waiting if p.grad is not None]
        if len(set(map(id, waiting))) < len(waiting):
            raise FastPathError(_TWICE)
        wait_for(bucket.stream, gradients)
        self._hand_over(bucket, waiting, gradients)

    def _hand_over_at_once(self, bucket: Bucket, together: Together, gradients: list[Any]) -> None:
        self._begin(bucket)
        if bucket.complete_with(len(together.weights)) and bucket.waiting:
            self._hand_over_waiting(bucket)
        fetched = self._fetched(bucket)
        whole = bucket.views.whole(fetched, together, together.weights)
        source = in_one_piece(gradients) if whole is not None else None
        if whole is not None and source is not None:
            self._copy(bucket, [whole], [source])
        else:
            self._copy(bucket, bucket.views.of(fetched, together.weights), gradients)
        self._tell(bucket, together.others, together.weights[-1])

    def _hand_over(
        self, bucket: Bucket, parameters: list[nn.Parameter], gradients: list[torch.Tensor]
    ) -> None:
        self._copy(bucket, bucket.views.of(self._fetched(bucket), parameters), gradients)
        for parameter in parameters:
            parameter.grad = None
        *others, last = parameters
        self._tell(bucket, others, last)

    @torch.no_grad()
    def _copy(
        self, bucket: Bucket, pieces: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        if bucket.gradients.is_data_distributed:
            torch._foreach_copy_(pieces, gradients)
        else:
            # A buffer that no other rank has a part of: it sums up all microbatches of the step.
            torch._foreach_add_(pieces, gradients)
        self.copies += 1

    def _fetched(self, bucket: Bucket) -> Any:
        self._make_room(bucket)
        dtype = self._fsdp.param_and_grad_buffer.mp_policy.grad_comm_dtype
        sharded = bucket.gradients.is_data_distributed
        return bucket.gradients.fetch_bucket(dtype=dtype if sharded else None)

    def _ready(self, bucket: Bucket) -> set[nn.Parameter]:
        """Megatron-FSDP's own set of what is in the bucket, until this is reduced and freed."""
        ready: set[nn.Parameter] = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params[
            bucket.number
        ]
        return ready

    def _tell(self, bucket: Bucket, others: Collection[nn.Parameter], last: nn.Parameter) -> None:
        """Tell Megatron-FSDP that these gradients are in their bucket."""
        bucket.handed_over += len(others) + 1
        ready = self._ready(bucket)
        ready.update(others)
        self._fsdp._params_require_handle_grad.difference_update(others)
        if len(ready) + 1 < bucket.size:
            # Its own function would find that there is nothing to reduce yet.
            ready.add(last)
            self._fsdp._params_require_handle_grad.discard(last)
            return
        target: Any = last
        target.grad_added_to_main_grad = True
        self._original([last])


def install_gradients(fsdp: Any) -> tuple[GradientBucketing, Callable[[], None]]:
    """Replace Megatron-FSDP's gradient function; returns what replaces it, and the undo.

    Raises UpstreamChangedError when the function is gone; nothing is changed then.
    """
    cell = find_cell(hook_functions(fsdp), _PROCESS)
    bucketing = GradientBucketing(fsdp, cell.cell_contents)
    with ExitStack() as undo:
        undo.callback(put_over_cell(cell, bucketing))
        undo.callback(bucketing.freed.install())
        undo.callback(run_before(fsdp, "forward", bucketing.refuse_what_is_left))
        return bucketing, undo.pop_all().close
