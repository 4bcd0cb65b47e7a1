"""Checks the versions of what a run imports."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from megatron_cg.arguments.rules_environment import engine_too_old, unseen_versions
from megatron_cg.arguments.schema import (
    TRANSFORMER_ENGINE,
    Environment,
    GraphArguments,
    RunArguments,
)
from megatron_cg.tools.doctor.finding import Finding, error, of_violation, ok, warning
from megatron_cg.tools.doctor.system import System

_TE = "transformer-engine"
INSTALL = {
    "torch": "pip install 'torch==2.11.0' --index-url https://download.pytorch.org/whl/cu130",
    "megatron-core": "pip install 'megatron-core==0.19.2'",
    "megatron-fsdp": "pip install 'megatron-fsdp==0.6.1'",
    # TE is compiled against the installed torch: requirements/gpu-build.txt.
    _TE: "pip install setuptools wheel ninja pybind11 && pip install --no-build-isolation "
    "'transformer-engine[core_cu13,pytorch]==2.20.2'",
}
"""What installs the versions that were measured."""


def versions(system: System) -> Iterator[Finding]:
    """The packages that this one depends on are there, not too old, and were tried before."""
    seen = system.told("versions")
    yield ok(f"Python {platform.python_version()}, {system.told('machine')}")
    for name, version in seen["packages"].items():
        if name != _TE or system.backend == TRANSFORMER_ENGINE:
            yield _package(system, name, version)
    for version, folder in seen["megatron"][1:]:
        yield warning(
            f"a second megatron.core, {version}, in {folder}",
            f"the first one on the path is imported, from {seen['megatron'][0][1]}",
            f"export PYTHONPATH={folder}  # to use the second",
        )


def _package(system: System, name: str, version: str | None) -> Finding:
    if version is None and name == "megatron-fsdp":
        return ok(f"no {name}, which only models without megatron-core need")
    if version is None:
        return error(f"{name} is not installed", "a run with graphs imports it", INSTALL[name])
    environment = Environment(versions={name: version}, backend=system.backend)
    if name == _TE:
        for violation in engine_too_old(RunArguments(), GraphArguments(), environment):
            return of_violation(violation)
    for text in unseen_versions(environment):
        why = "a short run with and without graphs says whether it works"
        return warning(text.partition(". ")[0], why, f"megatron-cg align  # or: {INSTALL[name]}")
    return ok(f"{name} {version}")
