"""Compile a region once, as several ranks that do not exist, for all that will.

A rank that does not exist has no GPU, no other process and no weights. The default process group is
torch's ``fake`` one, whose collectives do nothing. Requests for the current CUDA device get the
meta device, so that what is traced names no GPU.
"""

import sys
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
from megatron_cg.compiled.region import Capability, Region, differences
from megatron_cg.compiled.trace import Trace, trace
from megatron_cg.errors import PrecompileError
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

_FAKE_STORE = Symbol(
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "the store of a fake process group, and what registers its backend",
)
_DESTROY = Symbol(
    "megatron.core.parallel_state:destroy_model_parallel", "forgets Megatron's groups"
)
_DISPATCHER = Symbol(
    "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
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

    ``build`` builds the region of the rank that the default process group says, on the meta device.
    ``directory`` gets ``NAME.artifact``. ``world_size`` is that of the default process group while
    tracing; the artifact serves a run of any size whose groups have the sizes of the region's.
    ``capability`` is that of the GPUs that will load it; None for CPUs.

    Raises PrecompileError if the region cannot be traced, or is not the same on all ranks, and
    OSError if the folder cannot be written. Nothing has been written then.
    """
    path = artifact.path_of(Path(directory), name)
    first, peers = _trace_as(build, 0, world_size, capability)
    ranks = sorted({0, *peers, world_size - 1})
    state = dict(first.state)
    for rank in ranks[1:]:
        other, _ = _trace_as(build, rank, world_size, capability)
        _require_same(first, other, rank)
        # What differs between ranks of the same code has no part in it.
        state = {name: text for name, text in state.items() if other.state.get(name) == text}
    compiled = first.compiled
    code: bytes = type(compiled).serialize(compiled).serialized_data
    manifest = artifact.Manifest(
        code_sha256=sha256(code).hexdigest(),
        fingerprint=first.fingerprint,
        state=state,
        traced_ranks=ranks,
    )
    artifact.write(path, manifest, code)
    return manifest


def _trace_as(
    build: Callable[[], Region], rank: int, world_size: int, capability: Capability
) -> tuple[Trace, set[int]]:
    """The trace of a rank, and the ranks that share a group of the region with it."""
    with fake_rank(rank, world_size):
        region = build()
        groups = region.groups.values()
        peers = {peer for group in groups for peer in dist.get_process_group_ranks(group)}
        return trace(region, rank, capability), peers


def _require_same(first: Trace, other: Trace, rank: int) -> None:
    different = differences(first.fingerprint, other.fingerprint)
    if different:
        raise PrecompileError(
            f"rank 0 and rank {rank} would run different code: {different}. Leave what "
            "differs out of the region"
        )
    difference = first_difference(first.code, other.code, 0, rank)
    if difference is not None:
        raise PrecompileError(
            f"rank 0 and rank {rank} would run different code of {first.fingerprint['module']}: "
            f"the {difference}. Code of one rank would silently be wrong on the other. Leave this "
            "module out of the region, or give it the value as a tensor or a buffer"
        )


def _current_device() -> torch.device:
    return torch.device("meta")


@torch.compiler.substitute_in_graph(_current_device)
def _traced_current_device() -> torch.device:
    """For Dynamo, which takes what ``torch.cuda.current_device`` is for torch's own."""
    return torch.device("meta")


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` in the block.

    Raises PrecompileError if this process has a process group already.
    """
    if dist.is_initialized():
        raise PrecompileError(
            "this process has a process group: save in a process of its own, before "
            "init_process_group, or type megatron-cg precompile"
        )
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", _current_device),
        # Its objects would make a real stream. Traced code must not use this one.
        (_DISPATCHER.find(), "cuda_dtoh_stream", object()),
        # Dynamo cannot trace it; the eager step has warned.
        (warnings, "warn", lambda *_args, **_kwargs: None),
        # A process group puts its rank before every uncaught error, and never takes that back.
        (sys, "excepthook", sys.excepthook),
    ]
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        for owner, name, value in changes:
            stack.callback(set_attribute(owner, name, value, shared=True))
        store = _FAKE_STORE.find()()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        stack.callback(_destroy)
        yield


def _destroy() -> None:
    _DESTROY.find()()
    if dist.is_initialized():
        dist.destroy_process_group()
