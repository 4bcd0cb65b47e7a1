"""Formats all results as Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cg.tools.bench.results.cells import ELSEWHERE, failure_lines, heading
from megatron_cg.tools.bench.results.comparing import Change, change_lines
from megatron_cg.tools.bench.results.grids import grid, number
from megatron_cg.tools.bench.results.host import idle_lines, overhead_lines, phase_lines
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.scaling import Trend, trend_lines
from megatron_cg.tools.bench.results.steps import against_lines, memory_lines, step_lines
from megatron_cg.tools.bench.runs.bench_machine import described
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.store import Result, round_of


def as_markdown(
    results: Sequence[Result], trends: Sequence[Trend] = (), changes: Sequence[Change] = ()
) -> str:
    """The whole report."""
    lines = ["# megatron-cg bench", ""]
    for rows in tables(results):
        shown = [*step_lines(rows), *against_lines(rows), *memory_lines(rows)]
        lines += [f"## {heading(rows[0].result)}", "", *_about(rows), *_marked(shown), *shown]
        lines += [*phase_lines(rows), *overhead_lines(rows)]
        lines += [*idle_lines(rows), *failure_lines(rows)]
    lines += [*trend_lines(trends), *change_lines(changes), *_run_lines(results)]
    return "\n".join(lines).rstrip() + "\n"


def _about(rows: Sequence[Row]) -> list[str]:
    """Machine, versions and scopes, and what else holds for the whole table."""
    made = (result for row in rows for result in row.rounds if result["ranks"])
    result = next(made, None)
    if result is None:
        return []
    first = result["ranks"][0]
    libraries = {name: first["device"].get(name) for name in ("cuda", "cudnn", "nccl")}
    versions = first["versions"] | libraries
    words = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    scopes = " ".join(result["settings"]["scopes"]) or "whole layers"
    lines = [f"{described(result['machine'])}; {words}. Scopes: {scopes}."]
    if result.get("notice"):
        lines += ["", f"{result['notice']}."]
    return [*lines, ""]


def _marked(shown: Sequence[str]) -> list[str]:
    """What the mark of some ratios means, if there are any."""
    if not any(ELSEWHERE in line for line in shown):
        return []
    return [f"Ratios marked{ELSEWHERE} are to a run that was not made side by side with it.", ""]


def _run_lines(results: Sequence[Result]) -> list[str]:
    invocations = list(dict.fromkeys(result["invocation"] for result in results))
    several = any(round_of(result["key"]) > 1 for result in results)
    body = [
        [
            f"{result['key']['shape']}, {result['key']['contender']}",
            str(result["key"]["grouped_gemm"]),
            *([str(round_of(result["key"]))] if several else []),
            _letter(invocations.index(result["invocation"])),
            str(result["began"]),
            number(result["seconds"], ",.0f"),
            str(result["status"]),
        ]
        for result in results
    ]
    rounds = ["round"] if several else []
    columns = ["run", "grouped GEMM", *rounds, "made in", "began", "seconds", "status"]
    lines = ["## Runs", "", "Runs with the same letter were made in one invocation.", ""]
    lines += [*grid(columns, body), "", "Configurations:", ""]
    names = {result["key"]["contender"] for result in results}
    shown = (one for name, one in KNOWN.items() if name in names)
    return [*lines, *(f"- `{one.name}`: {one.description}" for one in shown)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"A{index}"
