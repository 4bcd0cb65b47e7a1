"""Finds which cuDNN, NCCL and cuBLAS are in this process, and asks each for its version.

For the doctor's other process: a library that is asked may end the process.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

_FAMILIES = {
    "cudnn": re.compile(r"libcudnn(_\w+)?\.so"),
    "nccl": re.compile(r"libnccl\.so"),
    "cublas": re.compile(r"libcublas(Lt)?\.so"),
}
"""Families of libraries, and the file names of each."""


def loaded() -> dict[str, list[dict[str, Any]]]:
    """``file`` and ``version`` of each library that is mapped into this process, by family."""
    return {
        family: [{"file": path, "version": _version(path)} for path in _files(family)]
        for family in _FAMILIES
    }


def dotted_cudnn(number: int) -> str | None:
    """``cudnnGetVersion``: major times 10000 since cuDNN 9, times 1000 before."""
    return _dotted(number, 10000 if number >= 90000 else 1000) if number else None


def _files(family: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if _FAMILIES[family].match(Path(path).name))


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
            os.write(writer, (_asked(path) or "").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text or None


def _asked(path: str) -> str | None:
    name, library, number = _stem(path), ctypes.CDLL(path), ctypes.c_int(0)
    if name == "libcudnn":
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return dotted_cudnn(library.cudnnGetVersion())
    if name == "libnccl":
        library.ncclGetVersion(ctypes.byref(number))
        return _dotted(number.value, 10000)
    parts = []
    for property_type in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        library.cublasGetProperty(property_type, ctypes.byref(number))
        parts.append(str(number.value))
    return ".".join(parts)


def _dotted(number: int, major: int) -> str:
    return f"{number // major}.{number % major // 100}.{number % 100}"
