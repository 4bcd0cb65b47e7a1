"""Named ranges for profilers.

``torch.profiler`` shows them as ``megatron_cg: <range>``, and so does Nsight Systems inside
``torch.autograd.profiler.emit_nvtx``, which Megatron's ``--profile`` enters. Without a profiler, a
range costs one check.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Literal

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

Range = Literal[
    "capture",
    "guard",
    "verification",
    "replay",
    "eager pass",
    "vote",
    "bucket gradients",
    "main gradients",
]
"""What a range covers. The backward pass of a replay is a node of autograd, which has its own."""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named_range(name: Range) -> AbstractContextManager[Any]:
    return record_function(f"megatron_cg: {name}") if _profiler_enabled() else _NOTHING


def in_range[**P, R](name: Range) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, so that each call is in :func:`named_range`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def in_named_range(*args: P.args, **kwargs: P.kwargs) -> R:
            with named_range(name):
                return function(*args, **kwargs)

        return in_named_range

    return decorate
