"""A buffer for a bucket's gradients, once nobody reads it.

Note [A buffer that is still read]
    With double buffers a unit's gradients go where those of the unit before last were reduced
    from. Megatron-FSDP frees that buffer on the stream of the reductions alone, so a copy on the
    stream of the backward pass is not ordered after the reduction that still reads it; a host that
    runs far enough ahead would overwrite what is being sent. So the copy waits, on the device, for
    the reductions that were freed for it. They were issued two units ago, and are over mostly.
    (NVIDIA/Megatron-LM#5222 is about another way to the same overwriting.)

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1: ``GradReducePipeline.grad_reduce_queue``
(event, function, bucket) and ``_enforce_double_buffer_limit``.
"""

from __future__ import annotations

from typing import Any

from megatron_cg.fsdp.symbols import in_both

RELIES_ON = in_both(
    "param_and_grad_buffer:GradReducePipeline",
    "what reduces gradients",
    attributes=("grad_reduce_queue", "_enforce_double_buffer_limit"),
)


def make_room(pipeline: Any, bucket: int) -> None:
    """Let Megatron-FSDP free a buffer for ``bucket``; see Note [A buffer that is still read].

    Args:
        pipeline: the ``GradReducePipeline``; its queue holds an event for each reduction.
        bucket: a bucket's number.
    """
    before = list(pipeline.grad_reduce_queue)
    pipeline._enforce_double_buffer_limit([bucket])
    for event, _free, _bucket in before[: len(before) - len(pipeline.grad_reduce_queue)]:
        event.wait()
