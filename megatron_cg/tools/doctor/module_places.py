"""Finds which copy of a module a run imports, from the files alone: nothing is imported."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_cg.tools.doctor.finding import Finding, error, note, ok, warning
from megatron_cg.tools.doctor.system import System
from megatron_cg.upstream.symbols import version_in

_WATCHED = (
    "megatron_cg megatron megatron_fsdp transformer_engine torch triton nvidia numpy yaml rich "
    "einops packaging pydantic"
).split()
"""Modules that a run imports; a user's file of the same name would be found first."""


def megatron_version(system: System) -> str | None:
    """The version of the ``megatron.core`` that would be imported, or None."""
    places = _holders(system, "core")
    return _version_in(places[0]) if places else None


def megatron_copies(system: System) -> Iterator[Finding]:
    """There is one Megatron: ``megatron.core`` and ``megatron.training`` are from one copy."""
    cores, trainings = _holders(system, "core"), _holders(system, "training")
    if not cores:
        yield error(
            "there is no megatron.core",
            "the layers that are captured and the loop that trains them are Megatron's",
            "pip install 'megatron-core==0.19.2'",
        )
        return
    first = cores[0]
    version = _version_in(first) or "of unknown version"
    yield ok(f"megatron.core {version} in {first}")
    for other in cores[1:]:
        yield warning(
            f"a second megatron.core, {_version_in(other) or 'of unknown version'}, in {other}",
            f"the first one is imported ({version}); the other may be the one you mean",
            f"export PYTHONPATH={other}  # to use the second",
        )
    if not trainings:
        yield error(
            f"there is no megatron.training beside {first}/megatron/core",
            "Megatron's training loop is what captures; only the Python API works without it",
            "pip install 'megatron-core==0.19.2'",
        )
    elif trainings[0] != first:
        yield warning(
            f"megatron.core is in {first} and megatron.training in {trainings[0]}",
            "two copies of different versions are mixed in one run",
            f"export PYTHONPATH={trainings[0]}",
        )


def dataset_helpers(system: System) -> Iterator[Finding]:
    """``megatron.training`` runs ``make`` in ``megatron/core/datasets`` when a run begins."""
    cores = _holders(system, "core")
    if not cores:
        return
    folder = cores[0] / "megatron" / "core" / "datasets"
    built = next(iter(folder.glob("helpers_cpp*.so")), None)
    if (folder / "Makefile").exists():
        yield from _compilers(system, folder)
    elif built is None:
        yield error(
            f"{folder} has neither a Makefile nor compiled helpers",
            "every run would end with 'Failed to compile the C++ dataset helper functions'",
            "pip install --force-reinstall --no-deps 'megatron-core==0.19.2'",
        )
    else:
        yield note(
            f"{folder} has no Makefile, as in every wheel of megatron-core",
            f"runs started through megatron_cg use the compiled {built.name}; a script started "
            "without it ends with 'Failed to compile the C++ dataset helper functions'",
            "torchrun ... -m megatron_cg pretrain_gpt.py ...",
        )


def shadowing(system: System) -> Iterator[Finding]:
    """No user's file hides a module that a run imports."""
    clear = True
    for name in _WATCHED:
        places = [place for folder in system.folders if (place := _regular(folder, name))]
        mine = places and places[0].parent in system.given
        if mine and (len(places) > 1 or _hides_namespace(system, name, places[0])):
            clear = False
            later = places[1] if len(places) > 1 else f"the namespace package {name}"
            yield warning(
                f"{places[0]} is imported as {name}, and not {later}",
                "the working directory and PYTHONPATH come before what is installed",
                f"mv {places[0]} {places[0].with_name('my_' + places[0].name)}",
            )
    own = next((p for f in system.folders if (p := _regular(f, "megatron_cg"))), None)
    if own is not None and own.resolve() != system.package.resolve():
        clear = False
        yield warning(
            f"a run imports megatron_cg from {own}, and this is {system.package}",
            "this report is not about the code that would run",
            f"PYTHONPATH={system.package.parent} megatron-cg doctor",
        )
    if clear:
        yield ok("no other file hides a module that a run imports")


def _compilers(system: System, folder: Path) -> Iterator[Finding]:
    path = system.variables.get("PATH", "")
    missing = [tool for tool in ("make", "g++") if shutil.which(tool, path=path) is None]
    if missing:
        yield error(
            f"{folder} has a Makefile, and there is no {' and no '.join(missing)}",
            "every run begins with make there, and ends if that fails",
            "apt-get install -y build-essential python3-dev",
        )
    else:
        yield ok(f"make and g++ are there to compile {folder}")


def _holders(system: System, part: str) -> list[Path]:
    """Folders with ``megatron/<part>``, in search order; ``megatron`` is a namespace package."""
    return [f for f in system.folders if (f / "megatron" / part / "__init__.py").is_file()]


def _version_in(folder: Path) -> str | None:
    return version_in(folder / "megatron" / "core")


def _regular(folder: Path, name: str) -> Path | None:
    """The module or regular package of that name in a folder; ignores namespace portions."""
    if (folder / name / "__init__.py").is_file():
        return folder / name
    file = folder / f"{name}.py"
    return file if file.is_file() else None


def _hides_namespace(system: System, name: str, place: Path) -> bool:
    """Whether a regular module precedes the portions of a namespace package."""
    others = (folder / name for folder in system.folders if folder != place.parent)
    return any(other.is_dir() for other in others)
