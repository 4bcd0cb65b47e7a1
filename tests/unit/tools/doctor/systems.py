"""Systems made for a test: what checks read, with nothing of this machine in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor.finding import Finding, Level, NotReachedError
from megatron_cg.tools.doctor.system import System, own_requirements

ROOT = Path(__file__).resolve().parents[4]
REQUIREMENTS = own_requirements(Path("/nowhere")) or own_requirements(ROOT)
VERSIONS = {
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "megatron-fsdp": "0.6.1",
    "transformer-engine": "2.20.2",
    "transformer-engine-torch": "2.20.2",
    "transformer-engine-cu13": "2.20.2",
}
H200 = {"name": "NVIDIA H200", "uuid": "ab" * 16, "capability": [9, 0]}
ANSWERS: dict[str, Any] = {
    ask.TORCH: {
        "version": "2.11.0+cu130",
        "file": "/venv/torch/__init__.py",
        "cuda": "13.0",
        "cudnn": "9.19.0",
        "nccl": "2.28.9",
        "architectures": ["sm_80", "sm_90", "compute_90"],
        "gloo": True,
        "loaded": {"cudnn": [], "nccl": [], "cublas": []},
    },
    ask.DRIVER: {
        "error": None,
        "cuda": "13.0",
        "gpus": [H200],
        "apart": [],
        "rows": [],
        "no_rows": "there is no nvidia-smi",
    },
}


def answering(answers: Mapping[str, Any]) -> Callable[[str], Any]:
    """An ``ask`` that knows these stages; an exception among them is raised."""

    def ask_for(stage: str) -> Any:
        if stage not in answers:
            raise NotReachedError(f"not looked at: {stage}")
        if isinstance(answers[stage], Exception):
            raise answers[stage]
        return answers[stage]

    return ask_for


def system(answers: Mapping[str, Any] | None = None, **changes: Any) -> System:
    """A good system but for ``changes``, and for ``answers`` instead of good ones."""
    versions = VERSIONS | changes.pop("versions", {})
    settings: dict[str, Any] = {
        "ask": answering(ANSWERS | dict(answers or {})),
        "version": versions.get,
        "requirements": REQUIREMENTS,
        "python": "3.12.3",
    }
    return System(**(settings | changes))


def torch_answer(**changes: Any) -> dict[str, Any]:
    """What a good torch says, but for ``changes``."""
    return {ask.TORCH: ANSWERS[ask.TORCH] | changes}


def of_level(findings: Iterable[Finding], level: Level) -> list[Finding]:
    """Those of one level; warnings and errors must say why they matter and what to type."""
    found = [finding for finding in findings if finding.level is level]
    if level in (Level.WARNING, Level.ERROR):
        assert all(finding.why and finding.remedy for finding in found)
    return found


def only(findings: Iterable[Finding], level: Level) -> Finding:
    """The one finding of that level."""
    (found,) = of_level(findings, level)
    return found
