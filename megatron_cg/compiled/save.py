"""Compile a region once, as several ranks that do not exist, for all that will.

A rank that does not exist has no GPU, no other process and no weights. The default process group is
torch's ``fake`` one, whose collectives do nothing. Requests for the current CUDA device get the
meta device, so that what is traced names no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from megatron_cg.compiled import artifact
from megatron_cg.compiled.graph import first_difference
from megatron_cg.compiled.region import Capability, Region, differences, short
from megatron_cg.compiled.trace import Trace, trace
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

_FAKE_STORE = Symbol(
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "the store of a fake process group, and what registers its backend",
)
_PARALLEL_STATE = "megatron.core.parallel_state"
_DESTROY = Symbol(f"{_PARALLEL_STATE}:destroy_model_parallel", "forgets Megatron's groups")
_DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHER = Symbol(
    f"{_DISPATCHER_MODULE}:MoEAlltoAllTokenDispatcher",
    "the class that keeps a stream for all its objects",
    attributes=("cuda_dtoh_stream",),
)
RELIES_ON = (_FAKE_STORE, _DESTROY, _DISPATCHER)


def save(
    build: Callable[[], Region],
    directory: Path | str,
    *,
    name: str,
    world_size: int,
    capability: Capability = (9, 0),
) -> artifact.Manifest:
    """Trace a region on the meta device as several ranks, and write the code if all agree.

    Traced are rank 0, all ranks that share a group of the region with it, and the last rank. Needs
    no GPU, no weights and no other process. Whether algorithms must be deterministic
    (``torch.use_deterministic_algorithms``) becomes part of the fingerprint.

    Args:
        build: builds the region of the rank that the default process group says, on the meta
            device.
        directory: where to write ``NAME.artifact``.
        name: of the artifact.
        world_size: ranks of the default process group while tracing. The artifact serves a run of
            any size whose groups have the sizes of the region's.
        capability: compute capability of the GPUs that will load it; None for CPUs.

    Raises:
        PrecompileError: the region cannot be traced, or is not the same on all ranks. Nothing has
            been written.
        OSError: the folder cannot be written.
    """
    path = artifact.path_of(Path(directory), name)
    first, peers = _trace_as(build, 0, world_size, capability)
    ranks = sorted({0, *peers, world_size - 1})
    for rank in ranks[1:]:
        other, _ = _trace_as(build, rank, world_size, capability)
        _require_same(first, other, rank)
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as folder:
        file = Path(folder, "code")
        first.compiled.save_compiled_function(str(file))
        code = file.read_bytes()
    manifest = artifact.Manifest(
        code_sha256=sha256(code).hexdigest(),
        code_bytes=len(code),
        fingerprint=first.fingerprint,
        traced_ranks=ranks,
        world_size=world_size,
    )
    artifact.write(path, manifest, code)
    return manifest


def _trace_as(
    build: Callable[[], Region], rank: int, world_size: int, capability: Capability
) -> tuple[Trace, set[int]]:
    """The trace of a rank, and the ranks that share a group of the region with it."""
    with fake_rank(rank, world_size, capability):
        region = build()
        groups = region.groups.values()
        peers = {peer for group in groups for peer in dist.get_process_group_ranks(group)}
        return trace(region, rank, capability), peers


def _require_same(first: Trace, other: Trace, rank: int) -> None:
    different = differences(first.fingerprint, other.fingerprint)
    if different:
        raise PrecompileError(
            f"rank 0 and rank {rank} would run different code: {short(different)}. Leave what "
            "differs out of the region"
        )
    difference = first_difference(first.code, other.code, 0, rank)
    if difference is not None:
        raise PrecompileError(
            f"rank 0 and rank {rank} would run different code of {first.fingerprint['module']}: "
            f"the {difference}. Code of one rank would silently be wrong on the other. Leave this "
            "module out of the region, or give it the value as a tensor or a buffer"
        )


class _NoStream:
    """A CUDA stream for constructors that only keep it. Using it in traced code is an error."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None


_capability: Capability = None
"""Of the GPUs that the code is for, while a fake rank is there."""


def _current_device() -> torch.device:
    return torch.device("meta")


def _device_capability(device: object = None) -> Capability:
    return _capability


@torch.compiler.substitute_in_graph(_current_device)
def _traced_current_device() -> torch.device:
    """For Dynamo, which takes what ``torch.cuda.current_device`` is for torch's own."""
    return torch.device("meta")


@torch.compiler.substitute_in_graph(_device_capability)
def _traced_device_capability(device: object = None) -> Capability:
    return _capability


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
    changes: list[tuple[Any, str, Any]] = [
        (sys.modules[__name__], "_capability", capability),
        (torch.cuda, "current_device", _current_device),
        (torch.cuda, "Stream", _NoStream),
        # Dynamo cannot trace it; the eager step has warned.
        (warnings, "warn", lambda *_args, **_kwargs: None),
        # A process group puts its rank before every uncaught error, and never takes that back.
        (sys, "excepthook", sys.excepthook),
    ]
    if capability is not None:
        changes.append((torch.cuda, "get_device_capability", _device_capability))
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        stack.callback(_forget_stream)
        for owner, name, value in changes:
            stack.callback(set_attribute(owner, name, value, shared=True))
        store = _FAKE_STORE.find()()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        stack.callback(_destroy)
        yield


def _forget_stream() -> None:
    """Let a dispatcher that is made later make a stream of its own, a real one."""
    if _DISPATCHER_MODULE in sys.modules:
        dispatcher = _DISPATCHER.find()
        if isinstance(dispatcher.cuda_dtoh_stream, _NoStream):
            dispatcher.cuda_dtoh_stream = None


def _destroy() -> None:
    if _PARALLEL_STATE in sys.modules:
        _DESTROY.find()()
    if dist.is_initialized():
        dist.destroy_process_group()
