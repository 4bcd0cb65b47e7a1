"""What is found on this machine, the checks of that, and what is printed.

What a run would import and load is imported and loaded here, in stages, and one that raises hides
no other. If one ends the process, Python says where.

Note [Two copies of cuDNN]
    Torch's wheels find their own libraries first. TE opens ``libcudnn.so`` by that bare name, which
    torch's wheel does not have (its file is ``libcudnn.so.9``), so a cuDNN of the system is loaded
    beside torch's. If it is older, TE silently falls back to unfused attention. TE looks in
    ``CUDNN_HOME`` first (transformer-engine 2.20.2, ``_load_cuda_library_from_system``).
"""

import faulthandler
import importlib
import json
import os
import platform
import re
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_cg import extensions
from megatron_cg.arguments import rules, schema
from megatron_cg.arguments.rule import Configuration
from megatron_cg.arguments.schema import PACKAGES
from megatron_cg.errors import Violation
from megatron_cg.upstream import te
from megatron_cg.upstream.symbols import Symbol, installed_version

FRAMEWORKS = ("megatron-bridge", "torchtitan")  # those of loops that this package was run with

_PACKAGE = Path(__file__).resolve().parents[2]
LEVELS = ERROR, WARNING, OK = "error", "warning", "ok"
"""The severity of a finding, the worst first; only ERROR means that the run is impossible."""


@dataclass(frozen=True)
class Finding:
    """What was found, why it matters, and what to type."""

    level: str
    found: str
    why: str = ""
    remedy: str = ""
    check: str = ""  # the name of the check, set when findings are collected


ok, warning, error = (partial(Finding, level) for level in (OK, WARNING, ERROR))


@dataclass(frozen=True)
class System:
    """Everything that checks read, so that no check reads the machine itself."""

    found: Mapping[str, Any]  # by stage of :func:`stages`; a stage that failed is not there
    backend: str = schema.TRANSFORMER_ENGINE
    variables: Mapping[str, str] = field(default_factory=dict)


_TE = "transformer-engine"
INSTALL = {
    "torch": "pip install 'torch==2.11.0' --index-url https://download.pytorch.org/whl/cu130",
    "megatron-core": "pip install 'megatron-core==0.19.2'",
    "megatron-fsdp": "pip install 'megatron-fsdp==0.6.1'",
    "megatron-bridge": "pip install --no-deps 'megatron-bridge==0.6.2'",
    "torchtitan": "pip install --no-deps 'torchtitan==0.3.0'",
    _TE: te.INSTALL,
}
"""What installs the versions that were measured."""

_NO_GPU = "megatron-cg align --backend tape  # needs no GPU"
_SECOND = "two copies in one process keep two states, and a call may reach either"
_SECOND_CUDNN = "with an older cuDNN, TE silently takes unfused attention: slow, other bits"
_SHOWN = ("CUBLAS", "CUDA_", "CUDNN_", "LD_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_NCCL_")


def versions(system: System) -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()}, {system.found['machine']}")
    for name, version in system.found["versions"].items():
        if name in FRAMEWORKS and version is None:
            continue
        if name != _TE or system.backend == schema.TRANSFORMER_ENGINE:
            yield _package(system, name, version)


def _package(system: System, name: str, version: str | None) -> Finding:
    if version is None and name == "megatron-fsdp":
        return ok(f"no {name}, which only models without megatron-core need")
    if version is None:
        return error(f"{name} is not installed", "a run with graphs imports it", INSTALL[name])
    environment = schema.Environment(versions={name: version}, backend=system.backend)
    if name == _TE:
        for violation in rules.engine_too_old(Configuration(environment=environment)):
            return _of_violation(violation)
    for text in rules.unseen_versions(environment):
        why = "a short run with and without graphs says whether it works"
        return warning(text.partition(". ")[0], why, f"megatron-cg align  # or: {INSTALL[name]}")
    return ok(f"{name} {version}")


def driver(system: System) -> Iterator[Finding]:
    seen = system.found["driver"]
    if system.found.get("torch", {"cuda": ""})["cuda"] is None:
        yield error("torch was built without CUDA", "graphs are captured by CUDA", INSTALL["torch"])
    elif seen["error"] is not None:
        hidden = system.variables.get("CUDA_VISIBLE_DEVICES")
        where = f" with CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
        remedy = "unset CUDA_VISIBLE_DEVICES" if where else "nvidia-smi"
        found = f"torch finds no GPU{where}: {seen['error']}"
        yield error(found, "graphs are captured on a GPU", f"{remedy}  # or {_NO_GPU}")
    for (name, *capability), count in Counter(map(tuple, seen.get("gpus", ()))).items():
        found = f"{count} x {name} (sm_{capability[0]}{capability[1]})"
        if capability < [8, 0]:
            yield error(found, "models train in bfloat16, which needs Ampere (sm_80)", _NO_GPU)
        elif capability != [9, 0]:
            yield warning(found, "verified on sm_90 (H100, H200) only", "megatron-cg align")
        else:
            yield ok(found)


def libraries(system: System) -> Iterator[Finding]:
    torch = system.found["torch"]
    with_te = system.found.get(_TE, torch)
    yield ok(f"CUDA {torch['cuda']}, torch in {torch['folder']}")
    if with_te.get("error"):
        yield error(
            f"import transformer_engine.pytorch fails: {with_te['error']}",
            "graphs are captured by TE; all its parts need one version, compiled for this torch",
            INSTALL[_TE] + " --force-reinstall --no-deps",
        )
    elif (lacks := with_te.get("experts_lack")) is not None:
        able = f"none: {lacks}"
        if not lacks:
            able = "--cg-grouped-gemm cublas (BF16, FP8) or torch (BF16)"
        elif lacks.startswith("cuBLASLt"):
            able = f"--cg-grouped-gemm torch (BF16); for cublas (BF16, FP8) {te.UPGRADE}: {lacks}"
        yield ok(f"dropless experts in graphs: {able}")
    for name, files in torch["loaded"].items():
        if not files:
            continue
        folders = {Path(file).parent for file in files}
        others = [file for file in with_te["loaded"][name] if Path(file).parent not in folders]
        folder = Path(files[0]).parent
        why, remedy = _SECOND, f"export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH"
        if name == "cuDNN":
            why, remedy = _SECOND_CUDNN, f"export CUDNN_HOME={folder.parent}"
        if others:
            yield warning(f"{others[0]} is loaded beside torch's {files[0]}", why, remedy)
        else:
            yield ok(f"one copy of {name} {torch.get(name) or ''}".strip())


def symbols(system: System) -> Iterator[Finding]:
    rows = system.found["symbols"]
    for package in sorted({row["package"] for row in rows}):
        states = [row for row in rows if row["package"] == package]
        broken = [row["symbol"] for row in states if row.get("error")]
        unknown = [row["symbol"] for row in states if row.get("unknown")]
        remedy = INSTALL.get(package, f"python -c 'import {states[0]['module']}'")
        if package in FRAMEWORKS:  # pip install --no-deps leaves out what it requires.
            remedy = f"pip check  # or: {remedy}"
        if broken:
            found = f"symbols of {package} are missing or changed: {', '.join(broken)}"
            yield error(found, "this package refuses to capture without them", remedy)
        if unknown:
            found = f"functions of {package} have unknown code: {', '.join(unknown)}"
            yield warning(found, "what replaces them stays off, and the rest works", remedy)
        gone = any(row.get("skipped") for row in states)
        yield ok(f"{package}: {'not installed' if gone else f'{len(states) - len(broken)} found'}")


def variables(system: System) -> Iterator[Finding]:
    """Broken rules, values that are likely not meant, and the other variables that matter."""
    env = system.variables
    environment = schema.Environment(variables=dict(env), backend=system.backend)
    for rule in (rules.expandable_segments, rules.max_connections):
        yield from map(_of_violation, rule(Configuration(environment=environment)))
    for name, value in env.items():
        if name.endswith("ALLOC_CONF") and "cudaMallocAsync" in value:
            why = "graphs need torch's own allocator: their pools, and the cleanup of captures"
            yield warning(f"{name}={value}", why, f"unset {name}")
    yield ok(", ".join(f"{n}={env[n]}" for n in sorted(env) if n.startswith(_SHOWN)) or "none set")


def _of_violation(violation: Violation) -> Finding:
    return error(violation.found, violation.reason, violation.remedy.removeprefix("type "))


CHECKS: dict[Callable[[System], Iterable[Finding]], str] = {
    versions: "versions",
    driver: "driver",
    libraries: "torch",
    symbols: "symbols",
    variables: "machine",
}
"""Each check, and the stage without which there is nothing to check."""
_OF_GPUS = (driver, libraries, variables)


def invoke(args: Namespace, _extra: Sequence[str]) -> int:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # It names the import that ends the process.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about others that they can do without
        found, failed = look(args.backend)
    here = System(found, args.backend, os.environ)
    findings = [*failed, *examine(here)]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        print_report(here, findings)
    return 0 if can_run(findings) else 1


def look(backend: str) -> tuple[dict[str, Any], list[Finding]]:
    """What each stage finds, and an error for each that fails."""
    found: dict[str, Any] = {}
    failed = []
    for name, stage in stages(backend):
        try:
            found[name] = stage()
        except (Exception, SystemExit) as raised:
            why = "a run would fail in the same place, and what depends on it is not known"
            failed.append(error(f"looking at {name} failed: {_text(raised)}", why, check=name))
    return found, failed


def examine(system: System) -> list[Finding]:
    findings: list[Finding] = []
    for check, stage in CHECKS.items():
        if stage not in system.found or (system.backend == schema.TAPE and check in _OF_GPUS):
            continue
        findings += [replace(finding, check=check.__name__) for finding in check(system)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def can_run(findings: Iterable[Finding]) -> bool:
    return all(finding.level is not ERROR for finding in findings)


def print_report(system: System, findings: Sequence[Finding]) -> None:
    """What is wrong and what to type, then the facts, a line for each check."""
    what = "the comparison on the CPU tape" if system.backend == schema.TAPE else "CUDA graphs"
    errors = sum(finding.level is ERROR for finding in findings)
    print(f"{what} cannot run here, errors: {errors}" if errors else f"{what} can run here")
    facts: dict[str, list[str]] = {}
    for finding in findings:
        if finding.level is OK:
            facts.setdefault(finding.check, []).append(finding.found)
            continue
        print(f"\n{finding.level}  {finding.check}: {finding.found}\n  why:  {finding.why}")
        if finding.remedy:
            print(f"  type: {finding.remedy}")
    for check, found in facts.items():
        print(f"\n{check:10} {', '.join(found)}")


_FAMILIES = {"cuDNN": "libcudnn", "NCCL": "libnccl.", "cuBLAS": "libcublas"}
"""Families of libraries, and what the file names of each begin with."""
_DECLARED = re.compile(r"^RELIES_ON\b", re.MULTILINE)
_OF_THE_TAPE, _OF_TE = "megatron_cg.tape.", "megatron_cg.backends.te_"
_NOT_USED = {schema.TAPE: (_OF_TE,), schema.NATIVE: (_OF_THE_TAPE, _OF_TE)}
"""Modules that a backend has no use for. With ``native``, TE's layers may be in the model."""


def stages(backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "machine", platform.platform
    yield "versions", lambda: {n: installed_version(n) for n in (*PACKAGES, *FRAMEWORKS)}
    if installed_version("torch"):
        yield "torch", look_at_torch
        if backend != schema.TAPE:
            yield "driver", look_at_driver
        if backend == schema.TRANSFORMER_ENGINE and installed_version(_TE):
            yield _TE, look_at_engine
        if installed_version("megatron-core"):
            yield "symbols", lambda: look_up(backend)


def look_at_torch() -> dict[str, Any]:
    import torch

    cudnn, nccl = torch.backends.cudnn.version() or 0, None
    if torch.version.cuda is not None:
        with suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "folder": str(Path(torch.__file__).parent),
        "cuda": torch.version.cuda,
        "cuDNN": f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}" if cudnn else None,
        "NCCL": nccl,
        "loaded": loaded(),
    }


def look_at_engine() -> dict[str, Any]:
    """Whether TE can be imported, the libraries that are then loaded, and what experts lack."""
    error, lacks = None, ""
    try:
        importlib.import_module("transformer_engine.pytorch")
        lacks = extensions.lacks_device_counts()
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


def look_at_driver() -> dict[str, Any]:
    from torch import cuda

    try:
        cuda.init()
    except Exception as error:
        return {"error": str(error)}
    indices = range(cuda.device_count())
    return {
        "error": None,
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

    Returns one dictionary per symbol. It has an ``error`` if it is not as expected, and ``unknown``
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
            names = {"module": module, "package": "megatron-cg", "symbol": module}
            rows.append({**names, "error": _text(error)})
            continue
        rows += [
            {"module": module, "package": symbol.distribution, "symbol": symbol.path}
            | _state(symbol)
            for symbol in symbols
            # The tape replaces TE, whether it is installed or not.
            if backend != schema.TAPE or symbol.distribution != "transformer-engine"
        ]
    return rows


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
