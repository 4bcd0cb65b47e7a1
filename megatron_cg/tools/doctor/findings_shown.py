"""Prints the report as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_cg.tools.doctor.checks import can_run
from megatron_cg.tools.doctor.finding import FORMAT, Finding, Level
from megatron_cg.tools.doctor.system import TAPE
from megatron_cg.version import __version__

_STYLE = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def as_json(backend: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """``{"format", "megatron_cg", "backend", "can_run", "counts", "findings"}``."""
    counts = Counter(finding.level for finding in findings)
    return {
        "format": FORMAT,
        "megatron_cg": __version__,
        "backend": backend,
        "can_run": can_run(findings),
        "counts": {level.value: counts[level] for level in Level},
        "findings": [finding.as_dict() for finding in findings],
    }


def print_report(console: Console, backend: str, findings: Sequence[Finding]) -> None:
    """One line per finding; below the table, the reason and the remedy of each that is not ok."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        level = Text(finding.level.value, style=_STYLE[finding.level])
        table.add_row(level, finding.check, Text(finding.found))
    console.print(table)
    for finding in sorted(
        (finding for finding in findings if finding.level is not Level.OK),
        key=lambda finding: list(Level).index(finding.level),
        reverse=True,
    ):
        console.print(_details(finding), soft_wrap=True)
    console.print(_verdict(backend, findings), soft_wrap=True)


def _details(finding: Finding) -> Text:
    text = Text()
    text.append(finding.level.value, style=_STYLE[finding.level])
    text.append(f"  {finding.check}: {finding.found}\n")
    text.append(f"    why:  {finding.why}\n")
    if finding.remedy:
        text.append("    type: ")
        text.append(f"{finding.remedy}\n", style="bold")
    return text


def _verdict(backend: str, findings: Sequence[Finding]) -> Text:
    what = "the comparison on the CPU tape" if backend == TAPE else "CUDA graphs"
    errors = sum(finding.level is Level.ERROR for finding in findings)
    if errors == 0:
        return Text(f"{what} can run here", style="green")
    things = "thing prevents" if errors == 1 else "things prevent"
    return Text(f"{errors} {things} {what} here", style="bold red")
