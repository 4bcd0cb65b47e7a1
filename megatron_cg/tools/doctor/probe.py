"""The doctor's other process: imports and loads what a run would, and writes what it finds.

``python -m megatron_cg.tools.doctor.probe FILE BACKEND`` writes a line of JSON when a stage begins
and one when it ends, so that a crash loses no earlier finding and is that of its stage.
"""

import importlib
import json
import platform
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron_cg.arguments.schema import FRAMEWORKS, NATIVE, PACKAGES, TAPE, TRANSFORMER_ENGINE
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.upstream.te import lacks_device_counts

_FAMILIES = {"cuDNN": "libcudnn", "NCCL": "libnccl.", "cuBLAS": "libcublas"}
"""Families of libraries, and what the file names of each begin with."""
_DECLARED = re.compile(r"^RELIES_ON\b", re.MULTILINE)
_PACKAGE = Path(__file__).resolve().parents[2]
_OF_THE_TAPE = "megatron_cg.tape."
_NOT_USED = {
    TAPE: ("megatron_cg.backends.te.",),
    NATIVE: (_OF_THE_TAPE, "megatron_cg.backends.te.te_"),
}
"""Modules that a backend has no use for. With ``native``, TE's layers may be in the model."""


def main(out: Path, backend: str) -> None:
    """Run the stages of the backend in turn. If one raises, its error is written."""
    with out.open("a", encoding="utf-8", buffering=1) as file:
        for name, stage in stages(backend).items():
            file.write(json.dumps({name: {}}) + "\n")
            try:
                answer = {"found": stage()}
            except (Exception, SystemExit) as error:
                answer = {"error": _text(error)}
            file.write(json.dumps({name: answer}) + "\n")


def stages(backend: str) -> dict[str, Callable[[], Any]]:
    stages_here: dict[str, Callable[[], Any]] = {
        "machine": platform.platform,
        "versions": lambda: {n: installed_version(n) for n in (*PACKAGES, *FRAMEWORKS)},
        "unmet": lambda: {name: unmet(name) for name in FRAMEWORKS},
    }
    if installed_version("torch"):
        stages_here["torch"] = torch
        if backend != TAPE:
            stages_here["driver"] = driver
        if backend == TRANSFORMER_ENGINE and installed_version("transformer-engine"):
            stages_here["transformer-engine"] = transformer_engine
        if installed_version("megatron-core"):
            stages_here["symbols"] = lambda: look_up(backend)
    return stages_here


def unmet(distribution: str) -> list[str]:
    """What an installed distribution requires, and is not here in a version that it takes."""
    with suppress(PackageNotFoundError):
        every = map(Requirement, requires(distribution) or ())
        return [f"{one.name}{one.specifier}" for one in every if not _is_met(one)]
    return []


def _is_met(needed: Requirement) -> bool:
    if needed.name in PACKAGES or (needed.marker and not needed.marker.evaluate({"extra": ""})):
        return True
    with suppress(PackageNotFoundError):
        return needed.specifier.contains(version(needed.name), prereleases=True)
    return False


def torch() -> dict[str, Any]:
    import torch as module

    cudnn, nccl = module.backends.cudnn.version() or 0, None
    if module.version.cuda is not None:
        with suppress(Exception):
            nccl = ".".join(map(str, module.cuda.nccl.version()))
    return {
        "folder": str(Path(module.__file__).parent),
        "cuda": module.version.cuda,
        "cuDNN": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}" if cudnn else None,
        "NCCL": nccl,
        "loaded": loaded(),
    }


def transformer_engine() -> dict[str, Any]:
    """Whether TE can be imported, the libraries that are then loaded, and what experts lack."""
    error, lacks = None, ""
    try:
        importlib.import_module("transformer_engine.pytorch")
        lacks = lacks_device_counts()
    except (Exception, SystemExit) as raised:
        error = _text(raised)
    return {"error": error, "loaded": loaded(), "experts_lack": lacks}


def loaded() -> dict[str, list[str]]:
    """The files of each family of libraries that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})
    return {
        family: [path for path in paths if Path(path).name.startswith(name)]
        for family, name in _FAMILIES.items()
    }


def driver() -> dict[str, Any]:
    from torch import cuda

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cuda.init()
    except Exception as error:
        return {"error": str(error)}
    indices = range(cuda.device_count())
    return {
        "error": None,
        "said": [" ".join(str(warning.message).split()) for warning in said],
        "gpus": [(cuda.get_device_name(n), *cuda.get_device_capability(n)) for n in indices],
    }


def modules_that_rely(package: Path = _PACKAGE) -> list[str]:
    """Names of the modules below ``package`` that declare a tuple ``RELIES_ON``, sorted.

    They are found in the sources, so there is no second list to maintain.
    """
    files = [p for p in package.rglob("*.py") if _DECLARED.search(p.read_text(encoding="utf-8"))]
    names = (".".join(path.relative_to(package.parent).with_suffix("").parts) for path in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def look_up(backend: str, package: Path = _PACKAGE) -> list[dict[str, Any]]:
    """Find each symbol that a run with ``backend`` needs, in installed packages.

    Returns one dictionary per symbol. ``error`` is None if it is as expected. ``unknown`` is a text
    if it is a function that we replace and its body is not one that we know. ``skipped``: the
    package is not installed. A module that cannot be imported has one entry, with its own name.
    """
    rows: list[dict[str, Any]] = []
    for module in modules_that_rely(package):
        if module.startswith(_NOT_USED.get(backend, _OF_THE_TAPE)):
            continue
        try:
            symbols: tuple[Symbol, ...] = importlib.import_module(module).RELIES_ON
        except Exception as error:
            rows.append(_row(module, "megatron-cg", module, error=_text(error)))
            continue
        rows += [
            _row(module, symbol.distribution, symbol.path, **_state(symbol))
            for symbol in symbols
            # The tape replaces TE, whether it is installed or not.
            if backend != TAPE or symbol.distribution != "transformer-engine"
        ]
    return rows


def _row(module: str, package: str, symbol: str, **state: Any) -> dict[str, Any]:
    row = {"module": module, "package": package, "symbol": symbol}
    return {**row, "error": None, "unknown": None, "skipped": False, **state}


def _state(symbol: Symbol) -> dict[str, Any]:
    if symbol.distribution != "megatron-core" and installed_version(symbol.distribution) is None:
        return {"skipped": True}
    try:
        symbol.find()
        return {"unknown": symbol.unknown_body()}
    except Exception as error:
        return {"error": _text(error)}


def _text(error: BaseException) -> str:
    cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
