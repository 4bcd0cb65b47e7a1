"""The plots of results, in the page and as PNG files; only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.scaling import Trend
from megatron_cg.tools.bench.runs.store import Result, slug
from megatron_cg.tools.pages.bars import Bars, Marks, legend, side_by_side, stacked
from megatron_cg.tools.pages.figures import Draw, Look, write_png

_PHASES = ("forward", "backward", "gradient finish", "optimizer step", "zero gradients", "log")
"""Phases of the main thread; they do not overlap."""
_TIMES = {"step": "step", "GPU busy": "busy"}
_MEMORY = {
    "peak allocated": "peak_allocated",
    "peak reserved": "peak_reserved",
    "peak in capture": "capture_peak",
}
"""Metrics by their names in the legend."""
Scaling = tuple[str, str, str]
"""Shape, grouped GEMM and dimension of a scaling run."""


def write_pngs(results: Sequence[Result], trends: Sequence[Trend], directory: Path) -> list[Path]:
    """Write every plot as a PNG file in ``directory``; returns the files."""
    draws: dict[str, Draw] = {}
    for rows in tables(results):
        key = {**rows[0].result["key"], "round": 1}
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
    times, memory = _bars(rows, _TIMES), _bars(rows, _MEMORY)
    host = {row.name: stack for row in rows if (stack := host_stack(row))}
    draws: dict[str, Draw] = {}
    if times:
        draws["step"] = side_by_side(times, "ms", "%.1f", _marks(rows))
    if memory:
        draws["memory"] = side_by_side(memory, "MiB")
    if host:
        draws["host"] = stacked(host, "ms")
    return draws


def of_trends(trends: Sequence[Trend]) -> dict[Scaling, Draw]:
    """A plot for each scaling run: each metric over the dimension, with its line."""

    def by(trend: Trend) -> Scaling:
        return trend.shape, trend.grouped_gemm, trend.dimension

    return {key: _trends(list(group)) for key, group in groupby(sorted(trends, key=by), by)}


def host_stack(row: Row) -> dict[str, float]:
    """Milliseconds per step of the main thread by phase; the time outside all phases comes last."""
    if not row.probed:
        return {}
    spent = {
        found["phase"]: float(found["ms"])
        for found in row.probed["phases"]
        if found["thread"] == "main" and found["phase"] in _PHASES
    }
    ordered = {phase: spent[phase] for phase in _PHASES if phase in spent}
    return ordered | {"other": max(0.0, float(row.probed["step_ms"]) - sum(ordered.values()))}


def _marks(rows: Sequence[Row]) -> Marks:
    """The median of each round; of one round, the quartiles."""
    marks = {}
    for row in rows:
        medians, quartiles = row.metrics["medians"], row.metrics["quartiles"]
        marks[row.name] = {"step": medians if len(medians) > 1 else quartiles or ()}
    return marks


def _bars(rows: Sequence[Row], metrics: Mapping[str, str]) -> Bars:
    """The values of each row that has some, by their names in the legend."""
    bars = {}
    for row in rows:
        values = {name: row.metrics[metric] for name, metric in metrics.items()}
        bars[row.name] = {name: value for name, value in values.items() if value is not None}
    return {name: values for name, values in bars.items() if values}


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
                line = [trend.at(x) for x in xs]
                axes.plot(xs, line, color=style["color"], linestyle="--", linewidth=1)
            axes.set_ylabel(f"{name}, {found[0].unit}")
            axes.set_ylim(bottom=0)
        legend(grid[0, 0], look)
        grid[-1, 0].set_xlabel(trends[0].dimension)

    return draw
