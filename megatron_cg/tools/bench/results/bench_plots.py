"""The plots of results, in the page and as PNG files; only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.scaling import Trend
from megatron_cg.tools.bench.runs.bench_schedule import of_all_rounds, slug
from megatron_cg.tools.bench.runs.store import Result
from megatron_cg.tools.pages.bars import Bars, Marks, legend, side_by_side, stacked
from megatron_cg.tools.pages.figures import Draw, Look, write_png

_PHASES = ("forward", "backward", "gradient finish", "optimizer step", "zero gradients", "log")
"""Phases of the main thread; they do not overlap."""
Scaling = tuple[str, str, str]
"""Shape, grouped GEMM and dimension of a scaling run."""


def write_pngs(results: Sequence[Result], trends: Sequence[Trend], directory: Path) -> list[Path]:
    """Write every plot as a PNG file in ``directory``; returns the files."""
    draws: dict[str, Draw] = {}
    for rows in tables(results):
        key = of_all_rounds(rows[0].result["key"])
        for kind, draw in of_table(rows).items():
            draws[slug(key | {"contender": kind})] = draw
    for names, draw in of_trends(trends).items():
        draws[f"scaling.{'.'.join(names)}"] = draw
    paths = {directory / f"{name}.png": draw for name, draw in draws.items()}
    for path, draw in paths.items():
        write_png(draw, path)
    return list(paths)


def of_table(rows: Sequence[Row]) -> dict[str, Draw]:
    """The plots of one table for which there are values; a scaling run has none."""
    if rows[0].result["key"]["dimension"]:
        return {}
    times: dict[str, dict[str, float | None]] = {}
    memory: dict[str, dict[str, float | None]] = {}
    for row in rows:
        found = row.metrics
        times[row.name] = {
            "step": found.step.median if found.step else None,
            "GPU busy": found.busy,
        }
        memory[row.name] = {
            "peak allocated": found.peak_allocated,
            "peak reserved": found.peak_reserved,
            "peak in capture": found.capture_peak,
        }
    host = {row.name: stack for row in rows if (stack := host_stack(row))}
    drawn = {
        "step": (bars := _known(times)) and side_by_side(bars, "ms", "%.1f", _marks(rows)),
        "memory": (bars := _known(memory)) and side_by_side(bars, "MiB"),
        "host": host and stacked(host, "ms"),
    }
    return {kind: draw for kind, draw in drawn.items() if callable(draw)}


def of_trends(trends: Sequence[Trend]) -> dict[Scaling, Draw]:
    """A plot for each scaling run: each metric over the dimension, with its line."""

    def by(trend: Trend) -> Scaling:
        return trend.shape, trend.grouped_gemm, trend.dimension

    return {key: _trends(list(group)) for key, group in groupby(sorted(trends, key=by), by)}


def host_stack(row: Row) -> dict[str, float]:
    """Milliseconds per step of the main thread by phase; the time outside all phases comes last."""
    ranks = row.result["ranks"]
    probed = ranks[0].get("probed") if ranks else None
    if not probed:
        return {}
    spent = {
        found["phase"]: float(found["ms"])
        for found in probed["phases"]
        if found["thread"] == "main" and found["phase"] in _PHASES
    }
    ordered = {phase: spent[phase] for phase in _PHASES if phase in spent}
    return ordered | {"other": max(0.0, float(probed["step_ms"]) - sum(ordered.values()))}


def _marks(rows: Sequence[Row]) -> Marks:
    """The median of each round; of one round, the quartiles."""
    marks = {}
    for row in rows:
        step, medians = row.metrics.step, row.metrics.medians
        if step is not None:
            marks[row.name] = {"step": medians if len(medians) > 1 else (step.low, step.high)}
    return marks


def _known(bars: Mapping[str, Mapping[str, float | None]]) -> Bars:
    known = {
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in bars.items()
    }
    return {name: values for name, values in known.items() if values}


def _trends(trends: Sequence[Trend]) -> Draw:
    names = list(dict.fromkeys(trend.metric for trend in trends))

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 0.8 + 1.9 * len(names))
        grid = figure.subplots(len(names), sharex=True, squeeze=False)
        colours = (look.palette.run, look.palette.reference, look.palette.third)
        for axes, name in zip(grid[:, 0], names, strict=True):
            found = [trend for trend in trends if trend.metric == name]
            for number, trend in enumerate(found):
                style = {"color": colours[number % 3], "marker": "os^xD"[number % 5]}
                xs, ys = zip(*trend.points, strict=True)
                axes.plot(xs, ys, linestyle="", label=trend.configuration, **style)
                line = [trend.line.at(x) for x in xs]
                axes.plot(xs, line, color=style["color"], linestyle="--", linewidth=1)
            axes.set_ylabel(f"{name}, {found[0].unit}")
            axes.set_ylim(bottom=0)
        legend(grid[0, 0], look)
        grid[-1, 0].set_xlabel(trends[0].dimension)

    return draw
