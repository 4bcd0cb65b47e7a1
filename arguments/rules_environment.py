"""Installed versions and environment variables."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from megatron_cg.arguments.rule import Configuration, Facts, Rule
from megatron_cg.arguments.schema import TAPE, TRANSFORMER_ENGINE, Environment
from megatron_cg.upstream.te import INSTALL

_SEEN = {
    "megatron-core": (0, 19, 2),
    "megatron-fsdp": (0, 6, 1),
    "transformer-engine": (2, 20, 2),
    "torch": (2, 11, 0),
    "megatron-bridge": (0, 6, 2),
    "torchtitan": (0, 3, 0),
}
"""The versions that this package was written for and measured with."""
_TAPE_ALONE = "was run with this package on the CPU tape alone, {measured} on GPUs"
_NEVER = "was never run with this package, {measured} was"
_SEEN_ALSO: dict[str, dict[tuple[int, ...], str]] = {
    "torch": dict.fromkeys(((2, 12), (2, 13), (2, 14), (2, 15)), _TAPE_ALONE),
    "megatron-core": {(0, 20): "was run with this package only as main at d98e8a64 of 2026-08-22"},
}
"""Further releases that were run, and how."""


def _release(version: str) -> tuple[int, ...] | None:
    try:
        return Version(version).release
    except InvalidVersion:
        return None


def _with_expandable_segments(given: Configuration) -> list[Facts]:
    """The variable that turns them on.

    torch 2.11 also reads PYTORCH_ALLOC_CONF; Megatron's own check does not.
    """
    variables = given.environment.variables
    if given.environment.backend == TAPE or variables.get("NCCL_GRAPH_REGISTER") == "0":
        return []
    return [
        {"name": name, "value": variables[name]}
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if "expandable_segments:True" in variables.get(name, "").replace(" ", "")
    ]


def _without_new_engine(given: Configuration) -> list[Facts]:
    """What is installed, if that is nothing or older than 2.19."""
    if given.environment.backend != TRANSFORMER_ENGINE:
        return []
    version = given.environment.versions.get("transformer-engine")
    if version is None:
        return [{"version": "is not installed"}]
    release = _release(version)
    return [{"version": version}] if release is not None and release < (2, 19) else []


engine_too_old = Rule(
    "transformer-engine-version",
    _without_new_engine,
    "transformer-engine {version}",
    "before 2.19 make_graphed_callables has no capture_time_hooks, so the hooks of FSDP units "
    "cannot run during capture",
    f"type {INSTALL}, or capture without it: {{flag:--cg-backend native}}",
)
"""Transformer Engine is optional, so an installation may lack it."""

expandable_segments = Rule(
    "expandable-segments",
    _with_expandable_segments,
    "{name}={value} without NCCL_GRAPH_REGISTER=0",
    "NCCL registers the buffers of a captured collective, and with expandable segments their "
    "memory may be unmapped later: illegal memory access in a replay",
    "type export NCCL_GRAPH_REGISTER=0, or take expandable_segments:True out of {name}",
)

max_connections = Rule(
    "max-connections",
    lambda c: c.environment.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    "CUDA_DEVICE_MAX_CONNECTIONS=1",
    "all streams then share one hardware queue, so Megatron-FSDP's gathers wait for the compute "
    "they should overlap with, and it refuses to start",
    "type unset CUDA_DEVICE_MAX_CONNECTIONS",
)

RULES = (engine_too_old, expandable_segments, max_connections)


def unseen_versions(environment: Environment) -> Iterator[str]:
    """A sentence for each installed version that was never run with this package."""
    for name, seen in _SEEN.items():
        version = environment.versions.get(name)
        if version is None:
            continue
        release = _release(version)
        if release is not None and release[: len(seen)] == seen and not Version(version).pre:
            continue
        also = _SEEN_ALSO.get(name, {}).get((release or ())[:2])
        if also is not None and environment.backend == TAPE:
            continue
        how = (also or _NEVER).format(measured=".".join(map(str, seen)))
        yield (
            f"{name} {version} {how}. Compare a short run with and without graphs before a long "
            "one: megatron-cg align."
        )
