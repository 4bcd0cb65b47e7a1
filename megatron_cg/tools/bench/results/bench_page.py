"""The HTML page of a benchmark's results: computes what ``bench.html`` shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_cg.files import write_text
from megatron_cg.tools.bench.results.cells import baseline_note, heading
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.rounds import Ratio
from megatron_cg.tools.bench.results.scaling import Trend
from megatron_cg.tools.bench.results.summary import summary, verdict
from megatron_cg.tools.bench.runs.bench_machine import described
from megatron_cg.tools.bench.runs.commands import CUTLASS
from megatron_cg.tools.bench.runs.configurations import EAGER, EXPERTS, GRAPHS
from megatron_cg.tools.bench.runs.store import FILE, Result
from megatron_cg.tools.pages.columns import own_words, parted
from megatron_cg.tools.pages.templates import render

PAGE = "bench.html"
_DRIFT = 0.1
"""A machine may drift by this within minutes."""


def write_page(results: Sequence[Result], trends: Sequence[Trend], directory: Path) -> Path:
    """Write the page of ``results`` into ``directory``; returns the file.

    Without matplotlib the page has no plots.
    """
    path = directory / PAGE
    runs = sorted(file.name for file in (directory / "runs").glob("*.json"))
    write_text(path, page(results, trends, [FILE, *(f"runs/{name}" for name in runs)]))
    return path


def page(results: Sequence[Result], trends: Sequence[Trend], files: Sequence[str]) -> str:
    """The page as one HTML document that loads nothing; ``files`` are linked."""
    found = tables(results)
    drawn = importlib.util.find_spec("matplotlib") is not None
    models = " and ".join(dict.fromkeys(str(result["key"]["shape"]) for result in results))
    last = max(str(result["began"])[:10] for result in results)
    return render(
        "bench/results/bench.html",
        title=f"Benchmark of {models}, {last}",
        machine="; ".join(dict.fromkeys(described(result["machine"]) for result in results)),
        verdict=_verdict(found),
        tables=[_table(f"table-{at}", rows, drawn) for at, rows in enumerate(found, 1)],
        trends=_trend_plots(trends) if drawn else [],
        notices=list(dict.fromkeys(notice for r in results if (notice := r.get("notice")))),
        files=files,
    )


def _verdict(found: Sequence[Sequence[Row]]) -> dict[str, str]:
    """Whether graphs are faster than their baselines, table by table."""
    compared = [
        (row, ratio)
        for rows in found
        for row in rows
        if row.name in (GRAPHS, EXPERTS) and not row.result["key"]["dimension"]
        if (ratio := row.step_ratio(row.baseline)) is not None
    ]
    if not compared:
        text = f"A ratio needs {EAGER} and {GRAPHS} at the same size."
        return {"kind": "note", "head": "No ratio of graphs to eager was measured", "text": text}
    names = dict.fromkeys(f"{row.name} against {row.baseline_name}" for row, _ in compared)
    kinds = {_kind(ratio) for _, ratio in compared}
    return {
        "kind": kinds.pop() if len(kinds) == 1 else "note",
        "head": "; ".join(names),
        "text": "; ".join(f"{_short(row)}: {verdict(row)}" for row, _ in compared) + ".",
    }


def _kind(ratio: Ratio) -> str:
    """Colour of a ratio: ``good`` and ``bad`` only beyond what a machine drifts in one round."""
    margin = 0.0 if ratio.rounds > 1 else _DRIFT
    if ratio.most < 1 - margin:
        return "good"
    return "bad" if ratio.least > 1 + margin else "note"


def _short(row: Row) -> str:
    key = row.result["key"]
    words = [str(key["shape"])] + (["CUTLASS"] if key["grouped_gemm"] == CUTLASS else [])
    return ", ".join(words + (["experts in graphs"] if row.name == EXPERTS else []))


def _table(name: str, rows: Sequence[Row], drawn: bool) -> dict[str, Any]:
    """What the page shows of one table."""
    plots = {}
    if drawn:
        from megatron_cg.tools.bench.results.bench_plots import of_table
        from megatron_cg.tools.pages.figures import Plot

        plots = {kind: Plot(f"{name}-{kind}", draw) for kind, draw in of_table(rows).items()}
    columns = [_facts(row.result) for row in rows]
    names = dict.fromkeys(fact for column in columns for fact in column)
    failures = [(row.name, r["error"]) for row in rows for r in row.rounds if r["error"]]
    notes = [(row.name, note) for row in rows for r in row.rounds for note in r["notes"]]
    return {
        "name": name,
        "title": heading(rows[0].result),
        "summary": summary(rows),
        "note": baseline_note(rows),
        "plots": plots,
        "names": [row.name for row in rows],
        "facts": parted([[fact, *(c.get(fact, "none") for c in columns)] for fact in names]),
        "commands": own_words({row.name: row.result.get("command") or () for row in rows}),
        "notes": list(dict.fromkeys([*failures, *notes])),
    }


def _facts(result: Result) -> dict[str, str]:
    """The settings of one run, by name."""
    rank = result["ranks"][0] if result["ranks"] else {"versions": {}, "device": {}}
    libraries = {name: rank["device"].get(name) for name in ("cuda", "cudnn", "nccl")}
    settings = {name: value for name, value in result["settings"].items() if value != []}
    settings["scopes"] = " ".join(result["settings"].get("scopes", ())) or "whole layers"
    facts = {
        **{name: version for name, version in (rank["versions"] | libraries).items() if version},
        "machine": described(result["machine"]),
        "began": result["began"],
        **settings,
        **(result.get("environment") or {}),
    }
    return {name: str(value) for name, value in facts.items()}


def _trend_plots(trends: Sequence[Trend]) -> list[tuple[str, Any]]:
    """A title and a plot for each scaling run."""
    from megatron_cg.tools.bench.results.bench_plots import of_trends
    from megatron_cg.tools.pages.figures import Plot

    return [
        (f"{shape}, grouped GEMM {gemm}, by {dimension}", Plot(f"scaling-{at}", draw))
        for at, ((shape, gemm, dimension), draw) in enumerate(of_trends(trends).items(), 1)
    ]
