"""Plots results; only this module needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.files import whole_file
from megatron_cg.tools.bench.bench_schedule import of_all_rounds, slug
from megatron_cg.tools.bench.metrics import Metrics, Row, tables
from megatron_cg.tools.bench.scaling import Trend
from megatron_cg.tools.bench.store import Result

_SHARED = ("forward", "backward", "gradient finish", "optimizer step", "zero gradients", "log")
"""Phases of the main thread; they do not overlap."""
_MEMORY: tuple[tuple[str, Callable[[Metrics], float | None], float], ...] = (
    ("peak reserved", lambda found: found.peak_reserved, 0.8),
    ("peak in capture", lambda found: found.capture_peak, 0.6),
    ("peak allocated", lambda found: found.peak_allocated, 0.35),
)
"""Stacked bars, with their heights."""


class PlotError(MegatronCGError):
    """Plots cannot be drawn on this machine."""


def plot_all(results: Sequence[Result], trends: Sequence[Trend], directory: Path) -> list[Path]:
    """Draw each table and each scaling run as PNG. Raises PlotError without matplotlib."""
    pyplot = _pyplot()
    files = []
    for rows in tables(results):
        measured = [row for row in rows if row.metrics.step]
        if len(measured) > 1 and not rows[0].result["key"]["dimension"]:
            key = of_all_rounds(rows[0].result["key"]) | {"contender": "table"}
            files.append(_plot_table(pyplot, measured, directory / f"{slug(key)}.png"))
    groups: dict[tuple[str, str, str], list[Trend]] = {}
    for trend in trends:
        groups.setdefault((trend.shape, trend.grouped_gemm, trend.dimension), []).append(trend)
    for name, group in groups.items():
        files.append(_plot_trends(pyplot, group, directory / f"scaling.{'.'.join(name)}.png"))
    return files


def _pyplot() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(
            "no plots without matplotlib: pip install matplotlib, then draw what was measured with "
            "megatron-cg bench --report and the same --out."
        ) from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def host_stack(row: Row) -> dict[str, float]:
    """Milliseconds per step of the main thread by phase; the time outside all phases comes last."""
    ranks = row.result["ranks"]
    probed = ranks[0].get("probed") if ranks else None
    if not probed:
        return {}
    spent = {
        found["phase"]: float(found["ms"])
        for found in probed["phases"]
        if found["thread"] == "main" and found["phase"] in _SHARED
    }
    ordered = {phase: spent[phase] for phase in _SHARED if phase in spent}
    return ordered | {"other": max(0.0, float(probed["step_ms"]) - sum(ordered.values()))}


def _plot_table(pyplot: Any, rows: Sequence[Row], path: Path) -> Path:
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 0.6 * len(rows) + 2.6))
    names = [row.name for row in rows]
    steps = [row.metrics.step for row in rows if row.metrics.step]
    places = range(len(rows))
    around = [
        [step.median - step.low for step in steps],
        [step.high - step.median for step in steps],
    ]
    axes[0].barh(places, [s.median for s in steps], xerr=around, color="tab:blue", label="step")
    busy = [(place, row.metrics.busy) for place, row in enumerate(rows) if row.metrics.busy]
    if busy:
        axes[0].barh(
            [place for place, _ in busy],
            [value for _, value in busy],
            height=0.35,
            color="tab:orange",
            label="GPU busy",
        )
    axes[0].set_xlabel("ms a step (median, quartiles)")
    _plot_rounds(axes[0], rows)
    _legend(axes[0])
    _plot_memory(axes[1], rows)
    _plot_host(axes[2], rows)
    for axis in axes:
        axis.set_yticks(list(places), names)
        axis.invert_yaxis()
    key = rows[0].result["key"]
    figure.suptitle(f"{key['shape']}, {key['layers']} layers, grouped GEMM {key['grouped_gemm']}")
    return _save(pyplot, figure, path)


def _plot_rounds(axis: Any, rows: Sequence[Row]) -> None:
    """Mark the median of each round, if there are several."""
    points = [
        (median, place)
        for place, row in enumerate(rows)
        for median in row.metrics.medians
        if len(row.metrics.medians) > 1
    ]
    if points:
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, "k|", markersize=12, label="each round's median")


def _plot_memory(axis: Any, rows: Sequence[Row]) -> None:
    for name, read, height in _MEMORY:
        values = [read(row.metrics) or 0.0 for row in rows]
        if any(values):
            axis.barh(range(len(rows)), values, height=height, label=name)
    axis.set_xlabel("MiB")
    _legend(axis)


def _plot_host(axis: Any, rows: Sequence[Row]) -> None:
    stacks = [host_stack(row) for row in rows]
    for phase in (*_SHARED, "other"):
        values = [stack.get(phase, 0.0) for stack in stacks]
        if any(values):
            before = [
                sum(list(stack.values())[: list(stack).index(phase)]) if phase in stack else 0.0
                for stack in stacks
            ]
            axis.barh(range(len(rows)), values, left=before, label=phase)
    axis.set_xlabel("ms a step of the host's main thread")
    _legend(axis)


def _legend(axis: Any) -> None:
    """Place the legend below the axis, where it hides no bar."""
    if axis.patches:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=4, fontsize="small")


def _plot_trends(pyplot: Any, trends: Sequence[Trend], path: Path) -> Path:
    names = list(dict.fromkeys(trend.metric for trend in trends))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for trend in (trend for trend in trends if trend.metric == name):
            xs = [x for x, _ in trend.points]
            drawn = axis.plot(xs, [y for _, y in trend.points], "o", label=trend.configuration)
            line = [trend.line.at(x) for x in xs]
            axis.plot(xs, line, "--", color=drawn[0].get_color(), linewidth=1)
            axis.set_ylabel(f"{name}, {trend.unit}")
        axis.set_xlabel(trends[0].dimension)
        axis.set_ylim(bottom=0)
        axis.legend()
    return _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    with whole_file(path) as part:
        figure.savefig(part, dpi=110, format=path.suffix[1:])
    pyplot.close(figure)
    return path
