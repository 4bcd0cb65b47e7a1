"""One rank of a run that does not exist: no GPU, no other process, no weights.

The default process group is torch's ``fake`` one, whose collectives do nothing. Requests for the
current CUDA device get the meta device, so that what is traced names no GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

META = torch.device("meta")

_FAKE_STORE = Symbol(
    "torch",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "the store of a fake process group, and what registers its backend",
)
_RULES = Symbol(
    "torch",
    "torch._dynamo.trace_rules:get_torch_obj_rule_map",
    "the map of torch's own functions, which Dynamo makes once",
)
RELIES_ON = (_FAKE_STORE, _RULES)


class _NoStream:
    """A CUDA stream for constructors that only keep it. Using it in traced code is an error."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None


def _meta_device() -> torch.device:
    return torch.device("meta")


def _no_warning(*_args: object, **_kwargs: object) -> None:
    """Nothing. Dynamo cannot trace ``warnings.warn``; the eager step has warned."""


@contextmanager
def fake_rank(rank: int, world_size: int, capability: tuple[int, int] | None) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` in the block, on a GPU of that compute capability.

    Raises PrecompileError if this process has a process group already.
    """
    if dist.is_initialized():
        raise PrecompileError(
            "this process has a process group: save in a process of its own, before "
            "init_process_group, or type megatron-cg precompile"
        )
    # Made before the names below change, or Dynamo would take ours for torch's own.
    _RULES.find()()
    with ExitStack() as stack:
        for owner, name, value in _names(capability):
            stack.callback(set_attribute(owner, name, value, shared=True))
        store = _FAKE_STORE.find()()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        stack.callback(_destroy)
        yield


def _names(capability: tuple[int, int] | None) -> list[tuple[Any, str, Any]]:
    named: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", _meta_device),
        (torch.cuda, "Stream", _NoStream),
        (warnings, "warn", _no_warning),
    ]
    if capability is not None:
        named.append((torch.cuda, "get_device_capability", lambda *_args: capability))
    return named


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
