"""Compile a region once, as several ranks that do not exist, for all that will.

A rank that does not exist has no GPU, no other process and no weights. The default process group is
torch's ``fake`` one, whose collectives do nothing. Requests for the current CUDA device get the
meta device, so that what is traced names no GPU. The artifact is one file: its manifest as a line
of JSON, and then the code.

Note [What is trusted]
    The code is a pickle of torch's, so decoding it can run any code. So the folder and the file
    must belong to this user or to root, and nobody else may write them. Who can write them could as
    well change the user's scripts. Access control lists are not looked at. The checksum in the
    manifest finds damage, not an attacker, who would change both. The file is read once, so the
    bytes that are checked are the bytes that are decoded.
"""

import json
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from megatron_cg.compiled.region import Capability, Region, differences
from megatron_cg.compiled.trace import Trace, first_difference, trace
from megatron_cg.errors import ArtifactRefusedError, PrecompileError
from megatron_cg.files import whole_file
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol


@dataclass(frozen=True)
class Manifest:
    """What is known of an artifact without decoding it."""

    code_sha256: str
    fingerprint: Mapping[str, str]
    state: Mapping[str, str]
    """Plain Python values that are constants of the code; see ``region.py``."""
    traced_ranks: Sequence[int]


def write(path: Path, manifest: Manifest, code: bytes) -> None:
    """Write an artifact that this user alone can read and write. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with whole_file(path, mode=0o600) as part:
        part.write_bytes(json.dumps(asdict(manifest), sort_keys=True).encode() + b"\n" + code)


def read(path: Path) -> tuple[Manifest, bytes]:
    """Read an artifact and its code. Nothing is decoded but the manifest, which is JSON.

    Raises ArtifactRefusedError if it is missing, not trusted, or damaged.
    """
    try:
        _require_own(path.parent, os.stat(path.parent))
        with path.open("rb") as file:
            _require_own(path, os.fstat(file.fileno()))
            data = file.read()
    except OSError as error:
        raise ArtifactRefusedError(
            f"{path} cannot be read ({error.strerror}): save it there first: docs/compiled.md"
        ) from error
    head, _, code = data.partition(b"\n")
    try:
        manifest = Manifest(**json.loads(head))
    except (ValueError, TypeError) as error:
        raise ArtifactRefusedError(
            f"{path} is damaged, or of another version of megatron_cg: it begins with no manifest "
            f"({error}). Copy it again, or save again"
        ) from error
    if sha256(code).hexdigest() != manifest.code_sha256:
        raise ArtifactRefusedError(
            f"{path} is damaged: its {len(code)} bytes of code have another SHA-256 than its "
            "manifest names. Copy it again, or save again"
        )
    return manifest, code


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in {os.geteuid(), 0}:
        raise ArtifactRefusedError(
            f"{path} belongs to user {status.st_uid} and not to you ({os.geteuid()}): decoding it "
            "could run that user's code. If you trust it, copy it to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactRefusedError(
            f"other users may write {path}, and decoding it could run their code. If you trust "
            f"what it holds now, type chmod go-w {path}"
        )


_DESTROY = Symbol(
    "megatron.core.parallel_state:destroy_model_parallel", "forgets Megatron's groups"
)
_DISPATCHER = Symbol(
    "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
    "the class that keeps a stream for all its objects",
    attributes=("cuda_dtoh_stream",),
)
RELIES_ON = (_DESTROY, _DISPATCHER)


def save(
    build: Callable[[], Region],
    directory: Path | str,
    *,
    name: str,
    world_size: int,
    capability: Capability = (9, 0),
) -> Manifest:
    """Trace a region on the meta device as several ranks, and write the code if all agree.

    Traced are rank 0, all ranks that share a group of the region with it, and the last rank. Needs
    no GPU, no weights and no other process. ``torch.use_deterministic_algorithms`` must be as in
    the run.

    ``build`` builds the region of the rank that the default process group says, on the meta device.
    ``directory`` gets ``NAME.artifact``. It serves a run of any size whose groups have the sizes of
    the region's, on GPUs of ``capability``, or on CPUs if that is None. ``world_size`` is that of
    the default process group while tracing.

    Raises PrecompileError if the region cannot be traced, or is not the same on all ranks, and
    OSError if the folder cannot be written. Nothing has been written then.
    """
    path = Path(directory, f"{name}.artifact")
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
    manifest = Manifest(sha256(code).hexdigest(), first.fingerprint, state, ranks)
    write(path, manifest, code)
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
    ranks = f"rank 0 and rank {rank} would run different code"
    if different := differences(first.fingerprint, other.fingerprint):
        raise PrecompileError(f"{ranks}: {different}. Leave what differs out of the region")
    if (found := first_difference(first.code, other.code, 0, rank)) is not None:
        raise PrecompileError(
            f"{ranks} of {first.fingerprint['module']}: the {found}. Code of one rank would "
            "silently be wrong on the other. Leave this module out of the region, or give it the "
            "value as a tensor or a buffer"
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
            "init_process_group"
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
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        stack.callback(_destroy)
        yield


def _destroy() -> None:
    _DESTROY.find()()
    if dist.is_initialized():
        dist.destroy_process_group()
