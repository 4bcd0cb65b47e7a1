"""Checks the versions of Python, packages and CUDA's libraries against the supported ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_cg.arguments.rules_environment import too_old, unseen_versions
from megatron_cg.arguments.schema import PACKAGES, Environment, GraphArguments, RunArguments
from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.finding import Finding, error, note, of_violation, ok, warning
from megatron_cg.tools.doctor.module_places import megatron_version
from megatron_cg.tools.doctor.system import System

_TE, _FSDP = "transformer-engine", "megatron-fsdp"
_BUILD_TOOLS = "setuptools wheel ninja pybind11"
"""Build dependencies of TE that pip does not install: ``requirements/gpu-build.txt``."""
_TE_PARTS = ("transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
_WITH_TORCH = {"cuda": ("CUDA", "13.0"), "cudnn": ("cuDNN", "9.19"), "nccl": ("NCCL", "2.28")}
"""The versions in torch 2.11.0+cu130, used for the measurements in the README's table."""
_TRY_FIRST = "megatron-cg align"
_NOT_TRIED = (
    "it is not known whether it works: the symbols that this package relies on are checked below, "
    "and a short run with and without graphs tests the rest"
)


def python(system: System) -> Iterator[Finding]:
    """The interpreter, against ``requires-python``."""
    wanted = _ranges(system).get("python")
    found = f"Python {system.python}"
    allowed = wanted.specifier if wanted is not None else SpecifierSet()
    if allowed.contains(system.python, prereleases=True):
        yield ok(found)
    elif _is_newer(system.python, allowed):
        yield warning(f"{found}, newer than {allowed}", _NOT_TRIED, _TRY_FIRST)
    else:
        yield error(
            f"{found}, and {allowed} is needed",
            "this package's own code does not run on it",
            "python3.12 -m venv venv && venv/bin/pip install megatron-cg",
        )


def packages(system: System) -> Iterator[Finding]:
    """The packages that we depend on are installed, not too old, and tested before."""
    ranges = _ranges(system)
    if not ranges:
        yield note(
            "the ranges of versions are not known",
            "megatron-cg is not installed and has no pyproject.toml beside it",
            "pip install megatron-cg",
        )
    for name in PACKAGES:
        if name == _TE and not system.wants_te:
            continue
        yield _package(system, name, ranges.get(name, Requirement(name)))


def te_parts(system: System) -> Iterator[Finding]:
    """The parts of TE must have one version, and match torch's CUDA.

    Source: transformer-engine 2.20.2, ``transformer_engine.common``, ``load_framework_extension``.
    """
    whole = system.version(_TE)
    parts = {name: system.version(name) for name in _TE_PARTS}
    there = {name: version for name, version in parts.items() if version is not None}
    if whole is None or not there:
        return
    different = [f"{name} {version}" for name, version in there.items() if version != whole]
    install = _build(f"transformer-engine[pytorch,core_cu13]=={whole}")
    if different:
        yield error(
            f"{', '.join(different)} beside {_TE} {whole}",
            "TE refuses to be imported when its parts are of different versions",
            install,
        )
    elif "transformer-engine-torch" not in there:
        yield error(
            f"{_TE} {whole} without transformer-engine-torch",
            "the part that torch calls is missing: transformer_engine.pytorch cannot be imported",
            install,
        )
    else:
        yield ok(f"{_TE} in {len(there) + 1} parts, all {whole}")


def cuda(system: System) -> Iterator[Finding]:
    """The versions that torch was built with, as torch reports them."""
    torch = system.ask(ask.TORCH)
    if torch["cuda"] is None:
        yield error(
            f"torch {torch['version']} was built without CUDA",
            "CUDA graphs are captured through torch's CUDA build",
            "pip install 'torch==2.11.0' --index-url https://download.pytorch.org/whl/cu130",
        )
        return
    for key, (name, seen) in _WITH_TORCH.items():
        version = torch[key]
        if version is None:
            yield note(f"torch does not say which {name} it has", f"{seen} is known to work")
        elif _begins_with(version, seen):
            yield ok(f"{name} {version}")
        else:
            yield note(
                f"{name} {version}, and this package was measured with {seen}",
                _NOT_TRIED,
                _TRY_FIRST,
            )


def _package(system: System, name: str, wanted: Requirement) -> Finding:
    version = system.version(name)
    if version is None and name == "megatron-core":
        version = megatron_version(system)
    if version is None:
        return _missing(system, wanted)
    environment = Environment(versions={name: version}, backend=system.backend)
    old = [v for v in too_old(RunArguments(), GraphArguments(), environment) if name in v.rule]
    if old:
        return dataclasses.replace(of_violation(old[0]), remedy=_install(wanted))
    found, allowed = f"{name} {version}", wanted.specifier
    if not allowed.contains(version, prereleases=True):
        if _is_newer(version, allowed):
            why = f"it is newer than any that was tested ({allowed}): {_NOT_TRIED}"
            remedy = f"{_TRY_FIRST}  # or: {_install(wanted)}"
            return warning(f"{found} was never tested", why, remedy)
        why = "older ones were never tested"
        return error(f"{found}, and {allowed} is needed", why, _install(wanted))
    unseen = list(unseen_versions(environment))
    return note(unseen[0].partition(". ")[0], _NOT_TRIED, _TRY_FIRST) if unseen else ok(found)


def _missing(system: System, wanted: Requirement) -> Finding:
    name = wanted.name
    if name == _FSDP:
        return note(
            f"{name} is not installed",
            "only models without megatron-core need it; megatron-core has its own copy",
            _install(wanted),
        )
    why = "graphs are captured by it" if name == _TE else "everything here is built on it"
    return error(f"{name} is not installed", why, _install(wanted))


def _install(wanted: Requirement) -> str:
    """The command that installs a package in the required range."""
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    what = f"{wanted.name}{extras}{wanted.specifier}"
    return _build(what) if wanted.name == _TE else f"pip install '{what}'"


def _build(what: str) -> str:
    """The commands that install a package compiled against the installed torch."""
    return f"pip install {_BUILD_TOOLS} && pip install --no-build-isolation '{what}'"


def _ranges(system: System) -> dict[str, Requirement]:
    found: dict[str, Requirement] = {}
    for line in system.requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        # An extra may repeat a name, as [gpu] and [te] do.
        found.setdefault(requirement.name, requirement)
    return found


def _is_newer(version: str, allowed: SpecifierSet) -> bool:
    """Whether a version outside the range is above it, not below."""
    lows = [Version(s.version) for s in allowed if s.operator in (">=", ">", "==", "~=")]
    try:
        return not lows or Version(version) >= max(lows)
    except InvalidVersion:
        return True


def _begins_with(version: str, seen: str) -> bool:
    return version == seen or version.startswith(seen + ".")
