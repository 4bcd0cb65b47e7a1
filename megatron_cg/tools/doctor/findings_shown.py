"""Prints the report as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_cg.arguments.schema import TAPE
from megatron_cg.tools.doctor.checks import can_run
from megatron_cg.tools.doctor.finding import FORMAT, Finding, Level
from megatron_cg.version import __version__

_STYLE = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}

_WHEN = {
    "enabled": "once enabled, until disabled:",
    "graphs live": "taken over while graphs live:",
}


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


def print_report(
    console: Console,
    backend: str,
    findings: Sequence[Finding],
    changes: Sequence[Mapping[str, str]] = (),
) -> None:
    """One line per finding; then ``changes``, and what is not ok with its reason and its remedy."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        level = Text(finding.level.value, style=_STYLE[finding.level])
        table.add_row(level, finding.check, Text(finding.found))
    console.print(table)
    if changes:
        console.print(_changes(changes), soft_wrap=True)
    for finding in sorted(
        (finding for finding in findings if finding.level is not Level.OK),
        key=lambda finding: list(Level).index(finding.level),
        reverse=True,
    ):
        console.print(_details(finding), soft_wrap=True)
    console.print(_verdict(backend, findings), soft_wrap=True)


def _changes(changes: Sequence[Mapping[str, str]]) -> Text:
    """What a run with graphs changes in other packages: short names, by time and our module."""
    text = Text("Changes in other packages, by our module (full names: --json)\n")
    for when, title in _WHEN.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for row in changes:
            if row["when"] == when:
                short = ".".join(row["place"].replace(".<locals>", "").split(".")[-2:])
                groups.setdefault((row["by"], row["package"]), []).append(short)
        text.append(f"  {title}\n" if groups else "")
        # Megatron-FSDP is in two packages, with the same names.
        alike: dict[tuple[str, str], list[str]] = {}
        for (module, package), places in groups.items():
            alike.setdefault((module, ", ".join(places)), []).append(package)
        for (module, listed), packages in alike.items():
            text.append(f"    {module}", style="cyan")
            text.append(f"  {', '.join(packages)}: {listed}\n")
    return text


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
