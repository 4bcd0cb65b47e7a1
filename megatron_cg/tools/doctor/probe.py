"""The doctor's other process: imports and loads libraries, and writes what it finds.

``python -m megatron_cg.tools.doctor.probe FILE BACKEND STAGE...`` writes one line of JSON per
stage, immediately, so a crash does not lose earlier findings. The stages' output goes to a log.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.loaded import dotted_cudnn, loaded
from megatron_cg.tools.doctor.relied_on import look_up, taken_over

_OWN = "megatron_cg"


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
        "cudnn": dotted_cudnn(module.backends.cudnn.version() or 0),
        "nccl": nccl,
        "architectures": (architectures or "").split(),
        "gloo": module.distributed.is_available() and module.distributed.is_gloo_available(),
        "loaded": loaded(),
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
    return {"error": error, "loaded": loaded()}


def driver(_backend: str) -> dict[str, Any]:
    """The CUDA driver of a run, as ``libcuda.so.1`` itself reports it, and its visible GPUs.

    Source: the CUDA driver API (``cuInit``, ``cuDriverGetVersion``, ``cuDeviceGet*``). ``rows`` are
    those of nvidia-smi, for all GPUs. ``apart`` are pairs of GPUs of which the first cannot access
    the memory of the second.
    """
    found: dict[str, Any] = {"error": None, "cuda": None, "gpus": [], "rows": [], "no_rows": ""}
    found["apart"] = []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return found | {"error": str(error)}
    number, text = ctypes.c_int(0), ctypes.c_char_p()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if code := cuda.cuInit(0):
        cuda.cuGetErrorName(code, ctypes.byref(text))
        name = (text.value or b"").decode() or "an error"
        return found | {"error": f"cuInit gives {name} ({code})"}
    cuda.cuDeviceGetCount(ctypes.byref(number))
    found["gpus"] = [_gpu(cuda, index) for index in range(number.value)]
    found["apart"] = _apart(cuda, number.value)
    found["rows"], found["no_rows"] = nvidia_smi()
    return found


def nvidia_smi() -> tuple[list[dict[str, Any]], str]:
    """``uuid``, ``driver`` and memory in MiB of each GPU, and why there are none."""
    query = "--query-gpu=uuid,driver_version,memory.total,memory.free"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as failure:
        return [], f"nvidia-smi failed: {failure}"
    rows = []
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[2].isdigit() and fields[3].isdigit():
            total, free = map(int, fields[2:])
            rows.append({"uuid": fields[0], "driver": fields[1], "total": total, "free": free})
    return rows, "" if rows else "nvidia-smi lists no memory"


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, uuid, name = ctypes.c_int(0), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(96)
    capability = [ctypes.c_int(0), ctypes.c_int(0)]
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetUuid(ctypes.byref(uuid), device)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for number, attribute in zip(capability, (75, 76), strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return {
        "name": name.value.decode(errors="replace"),
        "uuid": bytes(uuid).hex(),
        "capability": [number.value for number in capability],
    }


def _apart(cuda: ctypes.CDLL, number: int) -> list[tuple[int, int]]:
    found = []
    one, other, accessible = (ctypes.c_int(0) for _ in range(3))
    for pair in permutations(range(number), 2):
        for device, index in zip((one, other), pair, strict=True):
            cuda.cuDeviceGet(ctypes.byref(device), index)
        failed = cuda.cuDeviceCanAccessPeer(ctypes.byref(accessible), one, other)
        if failed or not accessible.value:
            found.append(pair)
    return found


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
    ask.TORCH: torch,
    ask.TE: transformer_engine,
    ask.DRIVER: driver,
    ask.SYMBOLS: look_up,
    ask.FLAGS: flags,
    ask.CHANGES: changes,
    ask.COLLECTED: collect_env,
}

if __name__ == "__main__":
    main(sys.argv[1:])
