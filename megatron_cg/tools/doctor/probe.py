"""The doctor's other process: imports and loads what a run would, and writes what it finds.

``python -m megatron_cg.tools.doctor.probe FILE BACKEND`` writes a line of JSON when a stage begins
and one when it ends, so that a crash loses no earlier finding and is that of its stage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import PACKAGES, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor.relied_on import look_up
from megatron_cg.upstream.symbols import installed_version, lookup, version_in

_FAMILIES = {"cuDNN": "libcudnn", "NCCL": "libnccl.", "cuBLAS": "libcublas"}
"""Families of libraries, and what the file names of each begin with."""


def main(out: Path, backend: str) -> None:
    """Run the stages of the backend in turn. If one raises, its error is written."""
    with out.open("a", encoding="utf-8", buffering=1) as file:
        for name, stage in stages(backend).items():
            file.write(json.dumps({name: {}}) + "\n")
            try:
                answer = {"found": stage()}
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            file.write(json.dumps({name: answer}) + "\n")


def stages(backend: str) -> dict[str, Callable[[], Any]]:
    """What can be looked at with the packages that are installed."""
    stages_here: dict[str, Callable[[], Any]] = {"machine": platform.platform, "versions": versions}
    if installed_version("torch"):
        stages_here["torch"] = torch
        if backend != TAPE:
            stages_here["driver"] = driver
        if backend == TRANSFORMER_ENGINE and installed_version("transformer-engine"):
            stages_here["transformer-engine"] = transformer_engine
        if installed_version("megatron-core"):
            stages_here |= {"symbols": lambda: look_up(backend), "settings": settings}
    return stages_here


def versions() -> dict[str, Any]:
    """The versions of what would be imported, and each folder with a Megatron, in search order."""
    places = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
    cores = [place for place in places if (place / "megatron/core/__init__.py").is_file()]
    return {
        "packages": {name: installed_version(name) for name in PACKAGES},
        "megatron": [(version_in(place / "megatron/core"), str(place)) for place in cores],
    }


def torch() -> dict[str, Any]:
    """Torch's own version information, and the libraries that it loaded."""
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
    """Whether TE can be imported, and the libraries that are then loaded, failed or not."""
    error = None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "loaded": loaded()}


def loaded() -> dict[str, list[str]]:
    """The files of each family of libraries that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})
    return {
        family: [path for path in paths if Path(path).name.startswith(name)]
        for family, name in _FAMILIES.items()
    }


def driver() -> dict[str, Any]:
    """The visible GPUs, or torch's error, and what torch warns of when it takes them.

    ``apart`` are pairs of GPUs of which the first cannot access the memory of the second.
    """
    from torch import cuda

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cuda.init()
    except Exception as error:
        return {"error": str(error)}
    indices = range(cuda.device_count())
    pairs = [pair for pair in permutations(indices, 2) if not cuda.can_device_access_peer(*pair)]
    return {
        "error": None,
        "said": [" ".join(str(warning.message).split()) for warning in said],
        "gpus": [(cuda.get_device_name(n), *cuda.get_device_capability(n)) for n in indices],
        "apart": pairs,
    }


def settings() -> None:
    """Megatron's parser has each setting that our rules read. Raises otherwise."""
    from megatron_cg.arguments.megatron import read_run

    path = "megatron.training.arguments:add_megatron_arguments"
    fill = lookup(path, "what fills the parser")
    read_run(fill(argparse.ArgumentParser(allow_abbrev=False)).parse_args([]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
