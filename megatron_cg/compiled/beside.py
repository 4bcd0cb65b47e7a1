"""Runs code with collectives, and comes back also if another rank has failed in it.

Note [In a thread of its own]
    A rank that fails between two collectives does not come to the second, and the others wait for
    it there. Nothing interrupts such a wait: gloo waits in C++, and NCCL's kernels wait on the GPU.
    So the code runs in another thread, and this one watches whether a rank has failed. The thread
    gets the modes of its caller, which torch keeps for each thread. If the thread still waits some
    time after the failure, it is left behind, and the process has to end.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch

from megatron_cg.upstream.symbols import Symbol

_STORE = Symbol(
    "torch",
    "torch.distributed.distributed_c10d:_get_default_store",
    "where a rank can say that it has failed",
)
RELIES_ON = (_STORE,)

GRACE = timedelta(seconds=10)
"""How long a rank goes on after another one has failed."""
_PAUSE = 0.5
_calls = count()


@dataclass
class Outcome:
    """How a rank came out of the code."""

    error: Exception | None = None
    waits: bool = False
    """Whether the code still waits in a collective, for a rank that has failed."""


def beside_other_ranks(run: Callable[[], None]) -> Outcome:
    """Call ``run``, which has collectives, on all ranks of the default group together."""
    store: Any = _STORE.find()()
    failed = f"megatron_cg/failed beside others/{next(_calls)}"
    found = Outcome(waits=True)

    def call() -> None:
        try:
            run()
        except Exception as error:
            found.error = error
        found.waits = False

    thread = threading.Thread(target=_with_modes_of_this_thread(call), daemon=True)
    thread.start()
    while thread.is_alive() and not store.check([failed]):
        thread.join(_PAUSE)
    thread.join(GRACE.total_seconds())
    if found.error is not None:
        store.set(failed, "")
    return found


def _with_modes_of_this_thread(call: Callable[[], None]) -> Callable[[], None]:
    """``call``, for another thread."""
    modes: list[Callable[[], Any]] = [
        partial(
            torch.inference_mode, torch.is_inference_mode_enabled()
        ),  # This sets gradients too.
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    cache = torch.is_autocast_cache_enabled()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(partial(torch.autocast, kind, dtype, cache_enabled=cache))
    device = torch.get_default_device()
    if device.type != "cpu":
        modes.append(lambda: device)
    if torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()
        modes += [partial(torch.cuda.device, stream.device), partial(torch.cuda.stream, stream)]

    def within() -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            call()

    context = contextvars.copy_context()
    return lambda: context.run(within)
