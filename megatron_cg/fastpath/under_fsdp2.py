"""FSDP2's part.

Note [Spans that nobody records]
    FSDP2 opens a span of torch's profiler around each of its functions, twelve times a layer in a
    step. Where no profiler runs, that is a seventh of the host time of its hooks (torch 2.11, eight
    layers of nine weights). Here a span is opened only while a profiler runs. The rest of that time
    cannot be prepared: FSDP2 finds out anew what it gathers, and its functions would have to be
    written again.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.upstream.patch import Undo, set_attribute
from megatron_cg.upstream.symbols import Symbol

_SPAN = Symbol(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:record_function", "a profiler's span"
)
_PROFILES = Symbol("torch.autograd:_profiler_enabled", "whether a profiler runs")
RELIES_ON = (_SPAN, _PROFILES)


def skip_spans() -> Undo:
    """See Note [Spans that nobody records]; returns the undo.

    Raises NotApplicableError if FSDP2 opens none, or opens them elsewhere.
    """
    try:
        opened, profiles = _SPAN.find(), _PROFILES.find()
    except UpstreamChangedError as why:
        raise NotApplicableError(str(why)) from why
    nothing = nullcontext()

    def span(name: str) -> AbstractContextManager[Any]:
        return opened(name) if profiles() else nothing

    return set_attribute(*_SPAN.place(), span)
