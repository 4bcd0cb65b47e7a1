"""Installed versions and environment variables."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from megatron_cg.arguments.rule import Rule
from megatron_cg.arguments.schema import (
    TRANSFORMER_ENGINE,
    Environment,
    GraphArguments,
    RunArguments,
)
from megatron_cg.errors import Violation

_TE = "transformer-engine"
_OLDEST = {
    _TE: (
        (2, 19),
        "its make_graphed_callables has no capture_time_hooks before 2.19, so the hooks of FSDP "
        "units cannot run during capture",
    ),
    "megatron-core": (
        (0, 19),
        "releases before 0.19 have no --fsdp-db-use-persist-buf-on-alloc-fail, without which "
        "unsharded parameters move",
    ),
}
_SEEN = {
    "megatron-core": (0, 19, 2),
    "megatron-fsdp": (0, 6, 1),
    _TE: (2, 20, 2),
    "torch": (2, 11, 0),
}
"""The versions that this package was written for and measured with."""
_SEEN_ON_TAPE = {"torch": ((2, 12), (2, 13), (2, 14), (2, 15))}
"""Further releases that passed the alignment and contract tests, only on the CPU tape."""


def _release(version: str) -> tuple[int, ...] | None:
    """The numbers of a version, without suffixes such as ``+cu130`` or ``.dev0``."""
    try:
        return Version(version).release
    except InvalidVersion:
        return None


def too_old(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Versions that are known to lack a required symbol or behaviour are refused."""
    for name, (oldest, reason) in _OLDEST.items():
        if name == _TE and environment.backend != TRANSFORMER_ENGINE:
            continue
        wanted = ".".join(map(str, oldest))
        version = environment.versions.get(name)
        if version is None:
            found, why = f"{name} is not installed", f"version {wanted} or newer is needed"
        elif (release := _release(version)) is None or release >= oldest:
            continue
        else:
            found, why = f"{name} {version}", reason
        extra, instead = "", ""
        if name == _TE:
            extra, instead = "[pytorch]", ", or capture without it: --cg-backend native"
        remedy = f"type pip install '{name}{extra}>={wanted}'{instead}"
        yield Violation(f"{name}-version", found, why, remedy)


def expandable_segments(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Expandable segments require NCCL's registration of graph buffers to be off.

    torch 2.11 also reads the setting from PYTORCH_ALLOC_CONF; Megatron's own check does not.
    """
    if environment.backend == "tape":
        return
    variables = environment.variables
    if variables.get("NCCL_GRAPH_REGISTER") == "0":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in variables.get(name, "").replace(" ", ""):
            yield Violation(
                "expandable-segments",
                f"{name}={variables[name]} without NCCL_GRAPH_REGISTER=0",
                "NCCL registers the buffers of a captured collective, and with expandable segments "
                "their memory may be unmapped later: illegal memory access in a replay",
                "type export NCCL_GRAPH_REGISTER=0, or take expandable_segments:True out of "
                f"{name}",
            )


def max_connections(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Megatron-FSDP refuses one connection, because its all-gathers could then not overlap."""
    if environment.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield Violation(
            "max-connections",
            "CUDA_DEVICE_MAX_CONNECTIONS=1",
            "all streams then share one hardware queue, so Megatron-FSDP's gathers wait for the "
            "compute they should overlap with, and it refuses to start",
            "type unset CUDA_DEVICE_MAX_CONNECTIONS",
        )


RULES: tuple[Rule, ...] = (too_old, expandable_segments, max_connections)


def unseen_versions(environment: Environment) -> Iterator[str]:
    """A sentence for each installed version that was never run with this package as it is now."""
    for name, seen in _SEEN.items():
        version = environment.versions.get(name)
        if version is None:
            continue
        release = _release(version)
        if release is not None and release[: len(seen)] == seen and not Version(version).pre:
            continue
        measured = ".".join(map(str, seen))
        taped = release is not None and release[:2] in _SEEN_ON_TAPE.get(name, ())
        if taped and environment.backend == "tape":
            continue
        found = (
            f"was run with this package on the CPU tape alone, {measured} on GPUs"
            if taped
            else f"was never run with this package, {measured} was"
        )
        yield (
            f"{name} {version} {found}. Compare a short run with and without graphs before a long "
            "one: megatron-cg align."
        )
