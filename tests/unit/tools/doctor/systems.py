"""Systems made for a test: what checks read, with nothing of this machine in it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.tools.doctor.checks import Finding, Level, System, examine

ROOT = Path(__file__).resolve().parents[4]
VERSIONS = {
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "megatron-fsdp": "0.6.1",
    "transformer-engine": "2.20.2",
}
CUDNN = "/venv/nvidia/cudnn/lib/libcudnn.so.9"
NCCL = "/venv/nvidia/nccl/lib/libnccl.so.2"
LOADED = {"cuDNN": [CUDNN], "NCCL": [NCCL], "cuBLAS": []}
FOUND: dict[str, Any] = {
    "machine": "Linux",
    "versions": VERSIONS,
    "unmet": {},
    "torch": {
        "folder": "/venv/torch",
        "cuda": "13.0",
        "cuDNN": "9.19.0",
        "NCCL": "2.28.9",
        "loaded": LOADED,
    },
    "driver": {"error": None, "said": [], "gpus": [["NVIDIA H200", 9, 0]]},
    "transformer-engine": {"error": None, "loaded": LOADED, "experts_lack": ""},
    "symbols": [],
}


def system(found: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> System:
    """A good system, but for what is ``found`` by stage and for the ``changes``."""
    stages = FOUND | {
        stage: FOUND[stage] | dict(differs) for stage, differs in (found or {}).items()
    }
    return System({stage: {"found": one} for stage, one in stages.items()}, **changes)


def of_level(findings: Iterable[Finding], level: Level) -> list[Finding]:
    """Those of one level; all but facts must say why they matter and what to type."""
    found = [finding for finding in findings if finding.level is level]
    assert level is Level.OK or all(finding.why and finding.remedy for finding in found)
    return found


def only(here: System, level: Level) -> Finding:
    (found,) = of_level(examine(here), level)
    return found
