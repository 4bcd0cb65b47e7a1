"""Checks driver, GPUs, loaded libraries, symbols of other packages and environment variables.

Note [Two copies of cuDNN]
    Torch's wheels find their own libraries first. TE opens ``libcudnn.so`` by that bare name, which
    torch's wheel does not have (its file is ``libcudnn.so.9``), so a cuDNN of the system is loaded
    beside torch's. If it is older, TE silently falls back to unfused attention. TE looks in
    ``CUDNN_HOME`` first (transformer-engine 2.20.2, ``_load_cuda_library_from_system``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_cg.arguments.rules_environment import expandable_segments, max_connections
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.tools.doctor.finding import Finding, error, note, of_violation, ok, warning
from megatron_cg.tools.doctor.system import System
from megatron_cg.tools.doctor.versions import INSTALL

_NO_GPU = "megatron-cg align --backend tape  # needs no GPU"
_SECOND = "two copies in one process keep two states, and a call may reach either"
_SECOND_CUDNN = "with an older cuDNN, TE silently takes unfused attention: slow, other bits"
_SHOWN = ("CUBLAS", "CUDA_", "CUDNN_", "LD_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_NCCL_")
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def driver(system: System) -> Iterator[Finding]:
    """Torch can use the driver and each GPU."""
    seen = system.told("driver")
    if system.told("torch")["cuda"] is None:
        yield error("torch was built without CUDA", "graphs are captured by CUDA", INSTALL["torch"])
    elif seen["error"] is not None:
        hidden = system.variables.get("CUDA_VISIBLE_DEVICES")
        where = f" with CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
        remedy = "unset CUDA_VISIBLE_DEVICES" if where else "nvidia-smi"
        found = f"torch finds no GPU{where}: {seen['error']}"
        yield error(found, "graphs are captured on a GPU", f"{remedy}  # or {_NO_GPU}")
    for text in seen.get("said", ()):
        yield warning(text, "torch says so when it takes the GPUs", INSTALL["torch"])
    for (name, *capability), count in Counter(map(tuple, seen.get("gpus", ()))).items():
        found = f"{count} x {name} (sm_{capability[0]}{capability[1]})"
        if capability < [8, 0]:
            yield error(found, "models train in bfloat16, which needs Ampere (sm_80)", _NO_GPU)
        elif capability != [9, 0]:
            yield note(found, "verified on sm_90 (H100, H200) only", "megatron-cg align")
        else:
            yield ok(found)
    for one, other in seen.get("apart", ())[:1]:
        yield note(
            f"GPU {one} cannot access the memory of GPU {other}",
            "--cg-moe-exchange peer needs that between the expert-parallel ranks of a host",
            "--cg-moe-exchange nccl  # the default",
        )


def libraries(system: System) -> Iterator[Finding]:
    """TE can be imported, and it loads no other copy of a library than torch did."""
    torch = system.told("torch")
    with_te = system.told("transformer-engine") or torch
    yield ok(f"CUDA {torch['cuda']}, torch in {torch['folder']}")
    if with_te.get("error"):
        yield error(
            f"import transformer_engine.pytorch fails: {with_te['error']}",
            "graphs are captured by TE; all its parts need one version, compiled for this torch",
            INSTALL["transformer-engine"] + " --force-reinstall --no-deps",
        )
    for name, files in torch["loaded"].items():
        own = {Path(file).parent: file for file in files}
        for folder, mine in list(own.items())[:1]:
            others = [file for file in with_te["loaded"][name] if Path(file).parent not in own]
            found = f"one copy of {name} {torch.get(name) or ''}".strip()
            if not others:
                yield ok(found)
            elif name == "cuDNN":
                remedy = f"export CUDNN_HOME={folder.parent}"
                yield warning(f"{others[0]} is loaded beside torch's {mine}", _SECOND_CUDNN, remedy)
            else:
                remedy = f"export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH"
                yield warning(f"{others[0]} is loaded beside torch's {mine}", _SECOND, remedy)


def symbols(system: System) -> Iterator[Finding]:
    """Every symbol that a module of ours relies on exists where it is declared and used."""
    rows = system.told("symbols")
    for package in sorted({row["package"] for row in rows}):
        states = [row for row in rows if row["package"] == package]
        broken, unknown = (sum(bool(row[key]) for row in states) for key in ("error", "unknown"))
        names = "megatron-cg doctor --verbose  # names them"
        remedy = f"{names}; or: {INSTALL[package]}" if package in INSTALL else names
        if broken:
            why = "this package uses them, and refuses to capture without them"
            yield error(f"{broken} symbols of {package} are missing or changed", why, remedy)
        if unknown:
            what = f"{unknown} functions of {package} that this package replaces have unknown code"
            yield warning(what, "their replacements stay off, and the rest works", remedy)
        skipped = sum(row["skipped"] for row in states)
        here = "not installed" if skipped else f"{len(states) - broken} found"
        yield ok(f"{package}: {here}")


def variables(system: System) -> Iterator[Finding]:
    """Broken rules, values that are likely not meant, and the other variables that matter."""
    env = system.variables
    environment = Environment(variables=dict(env), backend=system.backend)
    for rule in (expandable_segments, max_connections):
        yield from map(of_violation, rule(RunArguments(), GraphArguments(), environment))
    for name, value in env.items():
        if why := _mistake(name, value):
            yield warning(f"{name}={value}", why, f"unset {name}")
    yield ok(", ".join(f"{n}={env[n]}" for n in sorted(env) if n.startswith(_SHOWN)) or "none set")


def _mistake(name: str, value: str) -> str | None:
    """Why a value is probably not intended."""
    if name in _ATTENTION:
        return "Megatron sets it from --attention-backend, and ends a run that finds another value"
    if name.endswith("ALLOC_CONF") and "cudaMallocAsync" in value:
        return "graphs need torch's own allocator: their private pools, and the cleanup of captures"
    if name in ("CUDNN_HOME", "CUDNN_PATH") and not any(Path(value or "?").rglob("libcudnn.so*")):
        return "there is no libcudnn.so, so TE silently looks in the next place"
    if name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
        return "the host waits for every kernel: step times mean nothing, above all with graphs"
    return None
