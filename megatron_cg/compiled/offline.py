"""One rank of a run that does not exist: no GPU, no other process, no weights.

The default process group is torch's ``fake`` one, whose collectives do nothing. Requests for the
current CUDA device get the meta device, so that what is traced names no GPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from megatron_cg.compiled.fingerprint import Capability
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

_FAKE_STORE = Symbol(
    "torch",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "the store of a fake process group, and what registers its backend",
)
_PARALLEL_STATE = "megatron.core.parallel_state"
_DESTROY = Symbol(
    "megatron-core", f"{_PARALLEL_STATE}:destroy_model_parallel", "forgets Megatron's groups"
)
_DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHER = Symbol(
    "megatron-core",
    f"{_DISPATCHER_MODULE}:MoEAlltoAllTokenDispatcher",
    "the class that keeps a stream for all its objects",
    attributes=("cuda_dtoh_stream",),
)
RELIES_ON = (_FAKE_STORE, _DESTROY, _DISPATCHER)


class _NoStream:
    """A CUDA stream for constructors that only keep it. Using it in traced code is an error."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None


def _current_device() -> torch.device:
    return torch.device("meta")


_capability: Capability = None
"""Of the GPUs that the code is for, while a fake rank is there."""


def _device_capability(device: object = None) -> Capability:
    return _capability


@torch.compiler.substitute_in_graph(_device_capability)
def _traced_device_capability(device: object = None) -> Capability:
    """The same for Dynamo."""
    return _capability


@torch.compiler.substitute_in_graph(_current_device)
def _traced_current_device() -> torch.device:
    """The same for Dynamo, which takes what ``torch.cuda.current_device`` is for torch's own."""
    return torch.device("meta")


def _no_warning(*_args: object, **_kwargs: object) -> None:
    """Nothing. Dynamo cannot trace ``warnings.warn``; the eager step has warned."""


@contextmanager
def fake_rank(rank: int, world_size: int, capability: Capability) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` in the block, on a GPU of that compute capability.

    Raises PrecompileError if this process has a process group already.
    """
    if dist.is_initialized():
        raise PrecompileError(
            "this process has a process group: save in a process of its own, before "
            "init_process_group, or type megatron-cg precompile"
        )
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        # A process group puts its rank before every uncaught error, and never takes that back.
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        stack.callback(_forget_stream)
        for owner, name, value in _names(capability):
            stack.callback(set_attribute(owner, name, value, shared=True))
        store = _FAKE_STORE.find()()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        stack.callback(_destroy)
        yield


def _names(capability: Capability) -> list[tuple[Any, str, Any]]:
    named: list[tuple[Any, str, Any]] = [
        (sys.modules[__name__], "_capability", capability),
        (torch.cuda, "current_device", _current_device),
        (torch.cuda, "Stream", _NoStream),
        (warnings, "warn", _no_warning),
    ]
    if capability is not None:
        named.append((torch.cuda, "get_device_capability", _device_capability))
    return named


def _forget_stream() -> None:
    """Let a dispatcher that is made later make a stream of its own, a real one."""
    if _DISPATCHER_MODULE not in sys.modules:
        return
    dispatcher = _DISPATCHER.find()
    if isinstance(dispatcher.cuda_dtoh_stream, _NoStream):
        dispatcher.cuda_dtoh_stream = None


def _destroy() -> None:
    if _PARALLEL_STATE in sys.modules:
        _DESTROY.find()()
    if dist.is_initialized():
        dist.destroy_process_group()
