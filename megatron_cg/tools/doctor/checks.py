"""Runs all checks, and prints what they found: as text, or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_cg.arguments.schema import TAPE
from megatron_cg.tools.doctor import machine, versions
from megatron_cg.tools.doctor.finding import Finding, Level, error
from megatron_cg.tools.doctor.system import System
from megatron_cg.version import __version__

CHECKS: dict[Callable[[System], Iterable[Finding]], str] = {
    versions.versions: "versions",
    machine.driver: "driver",
    machine.libraries: "torch",
    machine.symbols: "symbols",
    machine.variables: "machine",
}
"""Each check, and the stage without which there is nothing to check."""
_OF_GPUS = (machine.driver, machine.libraries, machine.variables)
_STYLE = {Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}
FORMAT = 1
"""Version of the JSON; increases when a name in it changes its meaning or is removed."""


def examine(system: System) -> list[Finding]:
    """The findings of all checks for the system's backend, the worst first."""
    findings: list[Finding] = []
    for stage, answer in system.answers.items():
        if "error" in answer:
            repeat = f"python -m megatron_cg.tools.doctor.probe /dev/stdout {system.backend}"
            why = "a run would fail in the same place, and what depends on it is not known"
            failed = error(f"looking at {stage} failed: {answer['error']}", why, repeat)
            findings.append(replace(failed, check=stage))
    for check, stage in CHECKS.items():
        if system.told(stage) is None or (system.backend == TAPE and check in _OF_GPUS):
            continue
        findings += [replace(finding, check=check.__name__) for finding in check(system)]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def can_run(findings: Iterable[Finding]) -> bool:
    """Whether no finding prevents the run."""
    return all(finding.level is not Level.ERROR for finding in findings)


def as_json(system: System, findings: Sequence[Finding], *, verbose: bool) -> dict[str, Any]:
    """What ``--json`` prints; with ``verbose`` also the symbols of other packages."""
    counts = Counter(finding.level for finding in findings)
    shown = {
        "format": FORMAT,
        "megatron_cg": __version__,
        "backend": system.backend,
        "can_run": can_run(findings),
        "counts": {level.value: counts[level] for level in Level},
        "findings": [asdict(finding) for finding in findings],
    }
    return shown | ({"symbols": system.told("symbols")} if verbose else {})


def print_report(
    console: Console, system: System, findings: Sequence[Finding], *, verbose: bool
) -> None:
    """What is wrong and what to type, then the facts, a line for each check."""
    what = "the comparison on the CPU tape" if system.backend == TAPE else "CUDA graphs"
    errors = sum(finding.level is Level.ERROR for finding in findings)
    things = "thing prevents" if errors == 1 else "things prevent"
    verdict = f"{errors} {things} {what} here" if errors else f"{what} can run here"
    text = Text(f"{verdict}\n", style="bold red" if errors else "green")
    facts: dict[str, list[str]] = {}
    for finding in findings:
        if finding.level is Level.OK:
            facts.setdefault(finding.check, []).append(finding.found)
            continue
        text.append(f"\n{finding.level.value}", style=_STYLE[finding.level])
        text.append(f"  {finding.check}: {finding.found}\n  why:  {finding.why}\n", style="default")
        text.append(f"  type: {finding.remedy}\n" if finding.remedy else "", style="bold")
    for check, found in facts.items():
        text.append(f"\n{check:10}", style="cyan").append(" " + ", ".join(found), style="default")
    for row in system.told("symbols") or () if verbose else ():
        state = row["error"] or row["unknown"] or ("replaced" if row["replaced"] else "")
        text.append(f"\n{row['module']}  {row['package']} {row['symbol']}  {state}", style="dim")
    console.print(text, soft_wrap=True)
