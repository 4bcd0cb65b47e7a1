"""Compile a region once, as several ranks that do not exist, for all that will."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch.distributed as dist

from megatron_cg.compiled import store
from megatron_cg.compiled.fingerprint import Capability, differences, short
from megatron_cg.compiled.graph_checks import PREFIX
from megatron_cg.compiled.graph_code import digest, first_difference
from megatron_cg.compiled.offline import fake_rank
from megatron_cg.compiled.region import Build, Region
from megatron_cg.compiled.sources import traced_sources
from megatron_cg.compiled.trace import Trace, trace
from megatron_cg.errors import PrecompileError


@dataclass(frozen=True)
class Saved:
    """What was written."""

    manifest: store.Manifest
    manifest_sha256: str
    """Give it to ``load`` where the folder's owner is not to be trusted."""


def save(
    build: Build,
    directory: Path | str,
    *,
    name: str,
    world_size: int,
    ranks: Sequence[int] | None = None,
    capability: Capability = (9, 0),
) -> Saved:
    """Trace a region on the meta device as several ranks, and write the code if all agree.

    Needs no GPU, no weights and no other process. Traces under this process's numerics flags, such
    as ``torch.use_deterministic_algorithms``, which become part of the fingerprint.

    Args:
        build: builds the region of the rank that the default process group says.
        directory: where to write ``NAME.json``, the manifest, and ``NAME.artifact``.
        name: of the artifact.
        world_size: ranks of the default process group while tracing. The artifact serves a run of
            any size whose groups have the sizes of the region's.
        ranks: those to trace. Default: rank 0, all ranks that share a group of the region with it,
            and the last rank.
        capability: compute capability of the GPUs that will load it; None for CPUs.

    Raises:
        PrecompileError: the region cannot be traced, or is not the same on all ranks. Nothing has
            been written.
        OSError: the folder cannot be written.
    """
    store.paths(Path(directory), name)
    began = time.perf_counter()
    first, peers = _trace_as(build, 0 if ranks is None else ranks[0], world_size, capability)
    if ranks is None:
        ranks = sorted({0, *peers, world_size - 1})
    for rank in ranks:
        if rank != first.rank:
            other, _ = _trace_as(build, rank, world_size, capability)
            _require_same(first, other)
    with tempfile.TemporaryDirectory(prefix="megatron-cg-") as folder:
        artifact = Path(folder, "artifact")
        first.compiled.save_compiled_function(str(artifact))
        data = artifact.read_bytes()
        manifest = store.Manifest(
            name=name,
            artifact_sha256=sha256(data).hexdigest(),
            artifact_bytes=len(data),
            fingerprint=first.fingerprint,
            roles=tuple(sorted(role.removeprefix(PREFIX) for role in first.roles)),
            traced_ranks=tuple(ranks),
            world_size=world_size,
            code_sha256=digest(first.code),
            sources=traced_sources(first.compiled),
            seconds=time.perf_counter() - began,
        )
        return Saved(manifest, store.write(Path(directory), manifest, artifact))


def _trace_as(
    build: Build, rank: int, world_size: int, capability: Capability
) -> tuple[Trace, set[int]]:
    """The trace of a rank, and the ranks that share a group of the region with it."""
    if not 0 <= rank < world_size:
        raise PrecompileError(f"there is no rank {rank} in a world of {world_size}")
    with fake_rank(rank, world_size, capability):
        region = build()
        return trace(region, rank, capability), _peers(region)


def _peers(region: Region) -> set[int]:
    groups: Mapping[str, dist.ProcessGroup] = region.groups
    return {rank for group in groups.values() for rank in dist.get_process_group_ranks(group)}


def _require_same(one: Trace, other: Trace) -> None:
    different = differences(one.fingerprint, other.fingerprint)
    if different:
        raise PrecompileError(
            f"rank {one.rank} and rank {other.rank} would run different code: {short(different)}. "
            "Leave what differs out of the region"
        )
    found = first_difference(one.code, other.code)
    if found is not None:
        raise PrecompileError(
            f"rank {one.rank} and rank {other.rank} would run different code of "
            f"{one.fingerprint['module']}: the "
            f"{found.text(one.rank, other.rank)}. Code of one rank would silently be wrong on "
            "the other. Leave this module out of the region, or give it the value as a tensor or "
            "a buffer"
        )
