"""Checks cuDNN, NCCL and cuBLAS: there should be one copy of each, torch's own.

Note [Two copies of cuDNN]
    Torch's wheels contain their libraries and find them first. TE opens ``libcudnn.so`` by that
    bare name. Torch's wheel has no such file (its file is ``libcudnn.so.9``), so a cuDNN of the
    system, or of LD_LIBRARY_PATH, is loaded next to torch's. If it is older, TE silently falls back
    from fused to unfused attention. TE looks in ``CUDNN_HOME`` first (transformer-engine 2.20.2,
    ``transformer_engine.common``, ``_load_cuda_library_from_system``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.finding import Finding, ok, warning
from megatron_cg.tools.doctor.system import System, told

NAMES = {"cudnn": "cuDNN", "nccl": "NCCL", "cublas": "cuBLAS"}
_TE_PLACES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")


def libraries(system: System) -> Iterator[Finding]:
    """For each family of libraries: torch's loaded copies, and the other copies that TE loads."""
    by_torch = system.ask(ask.TORCH)["loaded"]
    with_te = told(system, ask.TE)
    for family, name in NAMES.items():
        torchs = by_torch[family]
        if not torchs:
            continue
        yield from _not_torchs_own(system, family, torchs)
        foreign = _foreign(torchs, with_te["loaded"][family]) if with_te else []
        for file in foreign:
            yield _second_copy(system, name, family, torchs, file)
        if not foreign:
            version = next((f["version"] for f in torchs if f["version"]), "of unknown version")
            yield ok(f"{name} {version}, one copy, in {_folder(torchs[0])}")


def _foreign(torchs: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One file for each folder that is not one of torch's folders."""
    folders = {_folder(file) for file in torchs}
    found: dict[Path, dict[str, Any]] = {}
    for file in others:
        # A file with a version represents the others in its folder.
        known = found.get(_folder(file), {}).get("version")
        if _folder(file) not in folders and known is None:
            found[_folder(file)] = file
    return list(found.values())


def _second_copy(
    system: System, name: str, family: str, torchs: list[dict[str, Any]], file: dict[str, Any]
) -> Finding:
    own = next((t for t in torchs if t["version"]), torchs[0])
    mine, other = own["version"], file["version"] or _version_in_name(file["file"])
    age = "a"
    if mine and other and Version(other) != Version(mine):
        age = "an older" if Version(other) < Version(mine) else "a newer"
    found = (
        f"{age} {name} {other or 'of unknown version'} is loaded beside torch's {mine}: "
        f"{file['file']} ({_origin(system, file['file'])})"
    )
    if family == "cudnn":
        return warning(
            found,
            "TE opens libcudnn.so by that bare name. If it gets an older one, it silently falls "
            "back from fused to unfused attention, which is slower and has other numbers",
            f"export CUDNN_HOME={_folder(own).parent}",
        )
    return warning(
        found,
        "two copies in one process keep two states, and a call may reach either of them",
        f"export LD_LIBRARY_PATH={_folder(own)}:$LD_LIBRARY_PATH",
    )


def _not_torchs_own(system: System, family: str, torchs: list[dict[str, Any]]) -> Iterator[Finding]:
    """Torch's wheel contains a copy, but torch has loaded another."""
    found = (system.purelib / "nvidia").glob(f"*/lib/lib{family}.so*")
    wheels = [path for path in found if path.is_file()]
    folders = {path.parent.resolve() for path in wheels}
    others = [file for file in torchs if folders and _folder(file) not in folders]
    if others:
        yield warning(
            f"torch has loaded {others[0]['file']} ({_origin(system, others[0]['file'])}) and not "
            f"its own {wheels[0]}",
            f"torch was built and tested with its own {NAMES[family]}",
            "unset LD_PRELOAD LD_LIBRARY_PATH",
        )


def _origin(system: System, path: str) -> str:
    """The setting that led to this path, if the path shows it."""
    folder = Path(path).resolve().parent
    if "LD_PRELOAD" in system.variables and Path(path).name in system.variables["LD_PRELOAD"]:
        return "by LD_PRELOAD"
    for name in _TE_PLACES:
        place = system.variables.get(name)
        if place and folder.is_relative_to(Path(place).resolve()):
            return f"by {name}"
    for entry in system.variables.get("LD_LIBRARY_PATH", "").split(":"):
        if entry and Path(entry).resolve() == folder:
            return "by LD_LIBRARY_PATH"
    return "the system's"


def _folder(file: dict[str, Any]) -> Path:
    return Path(file["file"]).resolve().parent


def _version_in_name(path: str) -> str | None:
    """``9.1.0`` from ``libcudnn.so.9.1.0``; follows links."""
    version = Path(path).resolve().name.partition(".so.")[2]
    return version if version.count(".") >= 1 and version.replace(".", "").isdigit() else None
