"""Checks the driver, the GPUs and their memory, and resources that processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.finding import Finding, error, note, ok, warning
from megatron_cg.tools.doctor.system import System

MIB = 2**20
_LEAST_CAPABILITY = (8, 0)
_VERIFIED_CAPABILITY = (9, 0)
_FREE = 0.9
"""The fraction of a GPU's memory that should be free before a run."""
_PAIRS = 4
"""How many pairs a finding names."""
_SHARED_MEMORY = 2**30
"""NCCL's guide: ``docker run --shm-size=1g --ulimit memlock=-1``."""
_NO_GPU = "megatron-cg align --backend tape  # needs no GPU"


def driver(system: System) -> Iterator[Finding]:
    """The driver exists, sees GPUs, and can run torch's CUDA."""
    seen, wanted = system.ask(ask.DRIVER), system.ask(ask.TORCH)["cuda"]
    if seen["error"] is not None:
        yield _no_driver(system, seen)
        return
    number = f"driver {seen['rows'][0]['driver']}" if seen["rows"] else "the driver"
    runs = f"{number} runs CUDA up to {seen['cuda']}"
    found = f"{runs}, and torch is built for CUDA {wanted}"
    if wanted is None or seen["cuda"] is None or Version(seen["cuda"]) >= Version(wanted):
        yield ok(runs)
    elif Version(seen["cuda"]).major < Version(wanted).major:
        yield error(
            found,
            "a driver runs no newer major version of CUDA than its own",
            "apt-get install nvidia-driver-580-server  # for CUDA 13.0; or another build of torch",
        )
    else:
        yield warning(
            found,
            "CUDA's minor-version compatibility covers it, but not kernels that are compiled while "
            "running (NVRTC, Triton) or features that came with the newer driver",
            "apt-get install --only-upgrade nvidia-driver-580-server",
        )


def gpus(system: System) -> Iterator[Finding]:
    """Each kind of GPU can run torch's kernels in bfloat16."""
    found = system.ask(ask.DRIVER)["gpus"]
    architectures = system.ask(ask.TORCH)["architectures"]
    kinds = {(gpu["name"], tuple(gpu["capability"])) for gpu in found}
    for name, capability in sorted(kinds):
        count = sum(gpu["name"] == name for gpu in found)
        yield _kind(
            f"{count} x {name} (sm_{capability[0]}{capability[1]})", capability, architectures
        )


def peers(system: System) -> Iterator[Finding]:
    """GPUs access each other's memory, which ``--cg-moe-exchange peer`` needs."""
    seen = system.ask(ask.DRIVER)
    if len(seen["gpus"]) < 2:
        return
    if not seen["apart"]:
        yield ok("each GPU can access the memory of the others")
        return
    pairs = ", ".join(f"{one} to {other}" for one, other in seen["apart"][:_PAIRS])
    more = len(seen["apart"]) - _PAIRS
    yield note(
        f"some GPUs cannot access the memory of others: {pairs}"
        + (f", and {more} more pairs" if more > 0 else ""),
        "--cg-moe-exchange peer needs that between the expert-parallel ranks of a host",
        "--cg-moe-exchange nccl  # the default",
    )


def memory(system: System) -> Iterator[Finding]:
    """Most of each GPU's memory is free before the run begins."""
    seen = system.ask(ask.DRIVER)
    visible = {gpu["uuid"] for gpu in seen["gpus"]}
    if not visible:
        return
    mine = [row for row in seen["rows"] if _hex(row["uuid"]) in visible]
    if not mine:
        yield note(
            f"free memory is not known: {seen['no_rows'] or 'nvidia-smi lists other GPUs'}",
            "a container needs the driver's utilities for it",
            "docker run --gpus 'all,\"capabilities=compute,utility\"' ...",
        )
        return
    taken = [row for row in mine if row["free"] < _FREE * row["total"]]
    for row in taken:
        yield warning(
            f"{row['total'] - row['free']:,} of {row['total']:,} MiB of {row['uuid']} are taken",
            "capture needs the memory of its graphs on top of an eager run's",
            "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",
        )
    if not taken:
        least = min(row["free"] for row in mine)
        yield ok(f"at least {least:,} of {mine[0]['total']:,} MiB are free on {len(mine)} GPUs")


def shared_memory(system: System) -> Iterator[Finding]:
    """NCCL and data loaders pass data between processes through /dev/shm."""
    place = system.shared_memory
    status = os.statvfs(place)
    total, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    found = f"{place} has {total // MIB:,} MiB, {free // MIB:,} of them free"
    if free < _SHARED_MEMORY:
        yield warning(
            found,
            "NCCL and data loaders keep their buffers there; where it is full, they end with "
            "'No space left on device' or a bus error",
            "docker run --shm-size=1g --ulimit memlock=-1 ...",
        )
    else:
        yield ok(found)


def gloo(system: System) -> Iterator[Finding]:
    """The comparison on the CPU trains in two processes over gloo."""
    if system.ask(ask.TORCH)["gloo"]:
        yield ok("torch has gloo")
    else:
        yield error(
            "torch was built without gloo",
            "the comparison on the CPU passes its messages over it",
            "pip install 'torch==2.11.0'",
        )


def _no_driver(system: System, seen: dict[str, Any]) -> Finding:
    hidden = system.variables.get("CUDA_VISIBLE_DEVICES")
    if seen["cuda"] is None:
        what, remedy = "no NVIDIA driver", "docker run --gpus all ...  # in a container;"
    elif hidden is not None:
        what = f"no GPU is visible with CUDA_VISIBLE_DEVICES={hidden}"
        remedy = "unset CUDA_VISIBLE_DEVICES  #"
    else:
        what = "the driver cannot be used"
        remedy = "nvidia-smi; dmesg | grep -i nvrm  # say more;"
    why = "graphs are captured on a GPU"
    return error(f"{what}: {seen['error']}", why, f"{remedy} or {_NO_GPU}")


def _kind(what: str, capability: tuple[int, ...], architectures: list[str]) -> Finding:
    if capability < _LEAST_CAPABILITY:
        why = "models train in bfloat16, which GPUs before Ampere (8.0) do not compute"
        return error(what, why, _NO_GPU)
    if architectures and not _has_kernels(capability, architectures):
        return error(
            f"{what}, and torch has kernels for {' '.join(architectures)}",
            "no kernel of torch runs on it",
            "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130",
        )
    if capability != _VERIFIED_CAPABILITY:
        why = "this package was verified on sm_90 (H100, H200) only"
        return note(what, why, "megatron-cg align")
    return ok(what)


def _has_kernels(capability: tuple[int, ...], architectures: list[str]) -> bool:
    """Binaries run on the same major and no older minor version; PTX on any newer GPU."""
    for entry in architectures:
        kind, _, digits = entry.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        theirs = (int(number[:-1]), int(number[-1]))
        if kind == "compute" and theirs <= capability:
            return True
        if kind == "sm" and theirs[0] == capability[0] and theirs <= capability:
            return True
    return False


def _hex(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")
