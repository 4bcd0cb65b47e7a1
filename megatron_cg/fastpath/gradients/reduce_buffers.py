"""Orders a copy into a bucket's buffer after the reduction that still reads the buffer.

Note [A buffer that is still read]
    With double buffers a unit's gradients go into the buffer from which those of the unit before
    last were reduced. Megatron-FSDP frees that buffer only on the stream of the reductions. So a
    copy on the stream of the backward pass is not ordered after the reduction that still reads the
    buffer. If the host runs far enough ahead, the copy overwrites data that is being sent. So each
    copy waits, on the device, for the last reduction whose buffer was freed. It does not matter
    which call freed it: the one of this copy, the one of another gradient of the same bucket, or a
    reduction. Reductions run in order on one stream, so waiting for the last one is enough. It was
    issued two units ago and has usually finished. A stream waits for each reduction once.
    (NVIDIA/Megatron-LM#5222 is about another cause of the same overwrite.)

The queue has (event, function, bucket) of each reduction. ``wait_for_previous_grad_reduce`` takes
reductions from its front and frees their buffers. ``_enforce_double_buffer_limit`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.upstream.patch import put_over

_FREES = "wait_for_previous_grad_reduce"
RELIES_ON = fsdp_class(
    "GradReducePipeline", "grad_reduce_queue", "_enforce_double_buffer_limit", _FREES
)


class FreedBuffers:
    """Finds the reduction that a copy must wait for; see Note [A buffer that is still read].

    Args:
        pipeline: the ``GradReducePipeline``; its queue holds an event for each reduction.
    """

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
        """Let Megatron-FSDP free a buffer for ``bucket``; then the current stream may write to it.

        Args:
            bucket: the number of the bucket.
            stream: the raw handle of the current stream.
        """
        self._pipeline._enforce_double_buffer_limit([bucket])
        if self._last is not None and stream not in self._waited:
            self._last.wait()
            self._waited.add(stream)
