"""The HTML page of a benchmark's results: computes what ``bench.html`` shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_cg.files import write_text
from megatron_cg.tools.bench.bench_machine import described
from megatron_cg.tools.bench.commands import CUTLASS
from megatron_cg.tools.bench.configurations import EAGER, GRAPHS
from megatron_cg.tools.bench.metrics import Row, tables
from megatron_cg.tools.bench.scaling import Trend
from megatron_cg.tools.bench.store import FILE, Result
from megatron_cg.tools.bench.summary import HEAD, headline, verdict
from megatron_cg.tools.pages.columns import own_words, parted
from megatron_cg.tools.pages.templates import render

PAGE = "bench.html"


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
    return render(
        "bench/bench.html",
        title=_title(results),
        machine="; ".join(dict.fromkeys(described(result["machine"]) for result in results)),
        verdict=_verdict(found),
        tiles=_tiles(found),
        head=HEAD,
        tables=[_table(f"table-{at}", rows, drawn) for at, rows in enumerate(found, 1)],
        trends=_trend_plots(trends) if drawn else [],
        notices=list(dict.fromkeys(notice for r in results if (notice := r.get("notice")))),
        files=files,
    )


def _title(results: Sequence[Result]) -> str:
    models = " and ".join(dict.fromkeys(str(result["key"]["shape"]) for result in results))
    return f"Benchmark of {models}, {max(str(result['began'])[:10] for result in results)}"


def _name(row: Row) -> str:
    key = row.result["key"]
    grown = f", scaling by {key['dimension']}" if key["dimension"] else ""
    return (
        f"{key['shape']}: {key['layers']} layers, {key['microbatches']} microbatches, "
        f"{key['nproc']} processes, grouped GEMM {key['grouped_gemm']}{grown}"
    )


def _compared(found: Sequence[Sequence[Row]]) -> Iterator[tuple[Row, Row]]:
    """What the page is about: graphs and eager, or else every row and the first of its table."""
    for rows in found:
        first, *others = rows
        for row in others:
            shown = row.name == GRAPHS or first.name != EAGER
            if shown and not row.result["key"]["dimension"] and row.step_ratio(first):
                yield row, first


def _verdict(found: Sequence[Sequence[Row]]) -> dict[str, str]:
    """What is faster, table by table."""
    words = [
        (f"{_short(row)}: {row.name} against {first.name}", verdict(row, first))
        for row, first in _compared(found)
    ]
    if not words:
        text = f"A ratio needs {EAGER} and another configuration at the same size."
        return {"kind": "note", "head": "No ratio was measured", "text": text}
    kinds = {{"faster": "good", "slower": "bad"}.get(text.split()[0], "note") for _, text in words}
    kind = kinds.pop() if len(kinds) == 1 else "note"
    (name, head), *others = words
    more = "; ".join(f"{name}: {text}" for name, text in others)
    return {"kind": kind, "head": f"{name}: {head}", "text": more and f"{more}."}


def _short(row: Row) -> str:
    key = row.result["key"]
    return str(key["shape"]) + (", CUTLASS" if key["grouped_gemm"] == CUTLASS else "")


def _tiles(found: Sequence[Sequence[Row]]) -> list[dict[str, str]]:
    tiles = []
    for row, first in _compared(found):
        ratio, step = row.step_ratio(first), row.metrics.step
        assert ratio is not None and step is not None
        spread = f", {ratio.least:.2f} to {ratio.most:.2f}" if ratio.least < ratio.most else ""
        label = f"{_short(row)}: step of {row.name} / {first.name}"
        note = f"{step.median:,.1f} ms{spread}"
        tiles.append({"label": label, "value": f"{ratio.median:.2f}", "note": note})
    return tiles


def _table(name: str, rows: Sequence[Row], drawn: bool) -> dict[str, Any]:
    """What the page shows of one table."""
    plots: Mapping[str, Any] = {}
    # Of a scaling run, there is one plot of all its tables.
    if drawn and not rows[0].result["key"]["dimension"]:
        from megatron_cg.tools.bench.page_plots import of_table

        plots = of_table(name, rows)
    columns = [_facts(row.result) for row in rows]
    names = dict.fromkeys(fact for column in columns for fact in column)
    failures = [(row.name, r["error"]) for row in rows for r in row.rounds if r["error"]]
    notes = [(row.name, note) for row in rows for r in row.rounds for note in r["notes"]]
    return {
        "name": name,
        "title": _name(rows[0]),
        "rows": headline(rows),
        "plots": plots,
        "names": [row.name for row in rows],
        "facts": parted([[fact, *(c.get(fact, "none") for c in columns)] for fact in names]),
        "commands": own_words({row.name: row.result.get("command") or () for row in rows}),
        "notes": list(dict.fromkeys([*failures, *notes])),
    }


def _facts(result: Result) -> dict[str, str]:
    """The settings of one run, by name."""
    rank = result["ranks"][0] if result["ranks"] else {"versions": {}, "device": {}}
    settings = {name: value for name, value in result["settings"].items() if value != []}
    settings["scopes"] = " ".join(result["settings"].get("scopes", ())) or "whole layers"
    groups = (
        {name: version for name, version in rank["versions"].items() if version},
        {
            name: rank["device"][name]
            for name in ("cuda", "cudnn", "nccl")
            if name in rank["device"]
        },
        {"machine": described(result["machine"]), "began": result["began"]},
        settings,
        result.get("environment") or {},
    )
    return {name: str(value) for group in groups for name, value in group.items()}


def _trend_plots(trends: Sequence[Trend]) -> list[tuple[str, Any]]:
    """A title and a plot for each scaling run."""
    from megatron_cg.tools.bench.page_plots import of_trends

    def by(trend: Trend) -> tuple[str, str, str]:
        return trend.shape, trend.grouped_gemm, trend.dimension

    groups = [(key, list(group)) for key, group in groupby(sorted(trends, key=by), by)]
    return [
        (f"{shape}, grouped GEMM {gemm}, by {dimension}", of_trends(f"scaling-{at}", group))
        for at, ((shape, gemm, dimension), group) in enumerate(groups, 1)
    ]
