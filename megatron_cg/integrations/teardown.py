"""Closes graphs before the process groups and the interpreter end, however the run ends.

Megatron deletes its graphs only when ``train`` returns normally. So closing is also tied to
``destroy_process_group``, to ``_abort_process_group``, which Megatron-Bridge calls after an error,
and to the end of the process.

Note [Graphs before process groups]
    A communicator cannot be destroyed while a graph contains its work: it waits until the graph is
    destroyed (NVIDIA-NeMo/Megatron-Bridge#3395: destroy_process_group hangs). A graph that a layer
    still refers to is never destroyed automatically.

Note [Waiting at the end]
    A graph must not be destroyed while it runs, so closing waits for the GPU. At the end of a
    failed run that can last forever: a collective that another rank never joined is still queued.
    So closing first polls the GPU for a limited time. If it is still busy then, graphs are left to
    the driver, and so are communicators, whose end would wait for them. Nor may the process wait at
    its exit. A thread cannot do this: Python 3.12 starts no threads during shutdown.
"""

import atexit
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.capture import session
from megatron_cg.consensus.process_exit import exit_without_waiting
from megatron_cg.upstream.patch import Undo, combined_undo, run_instead
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)

_C10D = "torch.distributed.distributed_c10d"
RELIES_ON = tuple(
    Symbol(path, "an end of process groups", parameters=("group",))
    for path in (
        "torch.distributed:destroy_process_group",
        f"{_C10D}:destroy_process_group",  # where torch's own callers look
        f"{_C10D}:_abort_process_group",
    )
)

SECONDS = 60.0
"""How long the end of a run waits for the GPU to become idle."""
_gave_up = False
"""Whether the GPU was busy for longer than that; nothing waits for it again."""


@combined_undo
def graphs_close_in_time() -> Iterator[Undo]:
    """Close all graphs before process groups and the interpreter end; returns the undo.

    Callers may undo it in any order. A reference that a script imported earlier (``from
    torch.distributed import ...``) is not patched.

    Raises UpstreamChangedError when torch has no such functions.
    """
    for symbol in RELIES_ON:
        yield run_instead(symbol, _closing)
    yield partial(atexit.unregister, atexit.register(partial(close_for_the_end)))


def _closing(end: Callable[..., None], group: Any = None) -> None:
    is_last = group is None or group == dist.group.WORLD
    if is_last and not close_for_the_end():
        exit_without_waiting()
    else:
        end(group)


def close_for_the_end() -> bool:
    """Close as many graphs as possible, in limited time, and raise nothing: errors are logged.

    Returns False if the GPU is still busy, so that graphs stay; see Note [Waiting at the end].
    """
    global _gave_up
    if not session.open_sessions():
        return True
    if _gave_up:
        return False
    try:
        if not _comes_to_rest(SECONDS):
            _gave_up = True
            logger.error(
                "megatron_cg: CUDA graphs are not released, because the GPU was still busy after "
                "%g seconds, most likely in a collective that another rank did not join.",
                SECONDS,
            )
            return False
        session.close_all_sessions()
    except Exception:
        logger.exception("megatron_cg: not all CUDA graphs could be released cleanly.")
    return True


def _comes_to_rest(seconds: float) -> bool:
    """Whether the GPU finishes all queued work in that time; after a CUDA error it runs nothing."""
    if not torch.cuda.is_initialized():
        return True
    deadline = time.monotonic() + seconds
    try:
        queued = [stream.record_event() for stream in _streams()]
        while not all(event.query() for event in queued):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except RuntimeError:
        logger.exception("megatron_cg: the GPU is in an error state.")
    return True


def _streams() -> list[torch.cuda.Stream]:
    """The current stream and all streams of torch's pools, so NCCL's and Megatron-FSDP's too.

    ``torch.cuda.Stream`` returns the streams of a pool one after the other.
    """
    current = torch.cuda.current_stream()
    streams = [current]
    least, greatest = current.priority_range()
    for priority in range(greatest, least + 1):
        pool: dict[int, torch.cuda.Stream] = {}
        while (stream := torch.cuda.Stream(priority=priority)).cuda_stream not in pool:
            pool[stream.cuda_stream] = stream
        streams += pool.values()
    return streams
