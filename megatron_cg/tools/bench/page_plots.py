"""The plots of the page; only this module and ``bench_plots`` need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from megatron_cg.tools.bench.bench_plots import host_stack
from megatron_cg.tools.bench.metrics import Row
from megatron_cg.tools.bench.scaling import Trend
from megatron_cg.tools.pages.bars import legend, side_by_side, stacked
from megatron_cg.tools.pages.figures import Draw, Look, Plot


def of_table(name: str, rows: Sequence[Row]) -> dict[str, Plot]:
    """The plots of one table for which there are values; ``name`` is unique in the page."""
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
        "step": (bars := _known(times)) and side_by_side(bars, "ms", "%.1f"),
        "memory": (bars := _known(memory)) and side_by_side(bars, "MiB"),
        "host": host and stacked(host, "ms"),
    }
    return {kind: Plot(f"{name}-{kind}", draw) for kind, draw in drawn.items() if callable(draw)}


def of_trends(name: str, trends: Sequence[Trend]) -> Plot:
    """Each metric over the dimension, with its line; ``trends`` share the dimension."""
    return Plot(name, _trends(trends))


def _known(bars: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
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
