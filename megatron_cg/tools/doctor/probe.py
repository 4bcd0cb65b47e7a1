"""The doctor's other process: imports and loads libraries, and writes what it finds.

``python -m megatron_cg.tools.doctor.probe FILE BACKEND STAGE...`` writes one line of JSON per
stage, immediately, so a crash does not lose earlier findings. The stages' output goes to a log.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.relied_on import look_up, taken_over

_OWN = "megatron_cg"
LIBRARIES = {
    "cudnn": re.compile(r"libcudnn(_\w+)?\.so"),
    "nccl": re.compile(r"libnccl\.so"),
    "cublas": re.compile(r"libcublas(Lt)?\.so"),
}
"""Families of libraries, and the file names of each."""
_BARE_NAMES = {
    "cudnn": ("libcudnn.so",),
    "nccl": ("libnccl.so.2", "libnccl.so"),
    "cublas": ("libcublas.so.13", "libcublas.so.12", "libcublas.so"),
}


def main(words: list[str]) -> None:
    """Run the stages in turn. If one raises, its error is written and the next one runs."""
    out, backend, *stages = words
    for stage in stages:
        answer: dict[str, Any]
        try:
            answer = {"found": STAGES[stage](backend)}
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps({stage: answer}) + "\n")


def loader(_backend: str) -> dict[str, Any]:
    """The files that the dynamic loader finds for the names of the libraries.

    TE opens ``libcudnn.so`` this way (transformer-engine 2.20.2, ``transformer_engine.common``,
    ``_load_cuda_library_from_system``). None if the loader finds nothing.
    """
    return {family: _opened(family, names) for family, names in _BARE_NAMES.items()}


def _opened(family: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    for name in names:
        with suppress(OSError):
            ctypes.CDLL(name)
            path = next(p for p in _loaded_files(family) if _stem(p) == _stem(name))
            return {"file": path, "version": _version(path)}
    return None


def torch(_backend: str) -> dict[str, Any]:
    """Torch's own version information, and the files it loaded."""
    import torch as module

    nccl: Any = None
    if module.version.cuda is not None:
        with suppress(Exception):
            nccl = ".".join(map(str, module.cuda.nccl.version()))
    architectures: Any = getattr(module._C, "_cuda_getArchFlags", lambda: "")()
    return {
        "version": module.__version__,
        "file": module.__file__,
        "cuda": module.version.cuda,
        "cudnn": _dotted_cudnn(module.backends.cudnn.version() or 0),
        "nccl": nccl,
        "architectures": (architectures or "").split(),
        "gloo": module.distributed.is_available() and module.distributed.is_gloo_available(),
        "loaded": _loaded(),
    }


def transformer_engine(_backend: str) -> dict[str, Any]:
    """Whether TE can be imported after torch, and the files that are then loaded.

    The files are known even if the import fails because of one of them.
    """
    error = None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "loaded": _loaded()}


def driver(_backend: str) -> dict[str, Any]:
    """The CUDA driver of a run, as ``libcuda.so.1`` itself reports it, and its visible GPUs.

    Source: the CUDA driver API (``cuInit``, ``cuDriverGetVersion``, ``cuDeviceGet*``).
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error), "cuda": None, "gpus": []}
    number = ctypes.c_int(0)
    version = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    code = cuda.cuInit(0)
    if code != 0:
        return {"error": _cuda_error(cuda, code), "cuda": version, "gpus": []}
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus = [_gpu(cuda, index) for index in range(number.value)]
    return {"error": None, "cuda": version, "gpus": gpus}


def symbols(backend: str) -> list[dict[str, Any]]:
    """Each symbol that a module of ours relies on; see ``relied_on.py``."""
    return look_up(backend)


def flags(_backend: str) -> None:
    """Whether Megatron's parser has every setting that our rules read."""
    from megatron_cg.arguments.megatron import read_run

    read_run(_no_arguments())


def changes(backend: str) -> list[dict[str, Any]]:
    """What a run with graphs changes in other packages: made here, listed, and undone.

    After that, the functions whose bodies the fast path knows and takes over while graphs live.
    """
    from megatron_cg.arguments.megatron import read_graph
    from megatron_cg.integrations.megatron import patches
    from megatron_cg.upstream.patch import applied

    patches.enable()
    try:
        args = _no_arguments()
        patches.start(read_graph(args), args, wants_graphs=True)
        made = [one for one in applied() if one.package != _OWN]
    finally:
        patches.disable()
    enabled = [
        {
            "package": one.package,
            "place": one.place,
            "by": one.value.partition(".<locals>")[0].rpartition(".")[0],
            "when": "enabled",
        }
        for one in made
    ]
    return enabled + taken_over(backend)


def collect_env(_backend: str) -> dict[str, Any]:
    """The machine and its software, as ``torch.utils.collect_env`` tells them."""
    from torch.utils.collect_env import get_env_info

    found: dict[str, Any] = get_env_info()._asdict()
    return found


def _no_arguments() -> argparse.Namespace:
    """Megatron's arguments of an empty command line."""
    from megatron_cg.upstream.symbols import lookup

    fill = lookup(
        "megatron-core",
        "megatron.training.arguments:add_megatron_arguments",
        "what fills the parser",
    )
    found: argparse.Namespace = fill(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    return found


STAGES: dict[str, Callable[[str], Any]] = {
    ask.LOADER: loader,
    ask.TORCH: torch,
    ask.TE: transformer_engine,
    ask.DRIVER: driver,
    ask.SYMBOLS: symbols,
    ask.FLAGS: flags,
    ask.CHANGES: changes,
    ask.COLLECTED: collect_env,
}


def _loaded() -> dict[str, list[dict[str, Any]]]:
    return {
        family: [{"file": path, "version": _version(path)} for path in _loaded_files(family)]
        for family in LIBRARIES
    }


def _loaded_files(family: str) -> list[str]:
    """Files of a family that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if LIBRARIES[family].match(Path(path).name))


def _stem(path: str) -> str:
    return Path(path).name.partition(".so")[0]


def _version(path: str) -> str | None:
    """The version that a loaded library reports; None if it reports none.

    Queried in a fork: a libcudnn.so that does not find its companion files terminates the calling
    process (cuDNN 9.19).
    """
    if _stem(path) not in ("libcudnn", "libnccl", "libcublas"):
        return None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(Exception):
            os.write(writer, (_asked_version(path) or "").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text or None


def _asked_version(path: str) -> str | None:
    name, library, number = _stem(path), ctypes.CDLL(path), ctypes.c_int(0)
    if name == "libcudnn":
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return _dotted_cudnn(library.cudnnGetVersion())
    if name == "libnccl":
        library.ncclGetVersion(ctypes.byref(number))
        return _dotted(number.value, 10000, 100)
    parts = []
    for property_type in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        library.cublasGetProperty(property_type, ctypes.byref(number))
        parts.append(str(number.value))
    return ".".join(parts)


def _dotted_cudnn(number: int) -> str | None:
    """``cudnnGetVersion``: major times 10000 since cuDNN 9, times 1000 before."""
    if not number:
        return None
    return _dotted(number, 10000 if number >= 90000 else 1000, 100)


def _dotted(number: int, major: int, minor: int) -> str:
    return f"{number // major}.{number % major // minor}.{number % minor}"


def _cuda_error(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return f"cuInit gives {(text.value or b'').decode() or 'an error'} ({code})"


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, uuid, name = ctypes.c_int(0), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(96)
    number = ctypes.c_int(0)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetUuid(ctypes.byref(uuid), device)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return {
        "name": name.value.decode(errors="replace"),
        "uuid": bytes(uuid).hex(),
        "capability": capability,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
