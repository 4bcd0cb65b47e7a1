"""The plots, with matplotlib: as SVG for the page, in two widths, and as PNG.

Every curve has a line style, marker or label besides its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_cg.tools.pages.bars import legend, shortened
from megatron_cg.tools.pages.figures import Draw, Look
from megatron_cg.tools.report.coverage import EAGER, GRAPHED, LEFT_OUT, Coverage
from megatron_cg.tools.report.series import (
    Quantity,
    Series,
    median,
    memory_over_steps,
    rates,
    step_times,
    thin,
)
from megatron_cg.tools.report.story import Story

MIB = 2**20
_MARKED = 40
"""With at most this many points, each has a mark."""
_CELLS = 64
"""With at most this many layers, each has its own cell; otherwise equal neighbours share one."""
_FAR = 4.0
"""A step time above this multiple of the median is left out of the plot."""


def of_quantity(story: Story, quantity: Quantity) -> Draw:
    """Both runs' curves, one over the other, and their difference below."""

    def draw(figure: Figure, look: Look) -> None:
        both = quantity.difference is not None
        heights = (5, 3 if quantity.unequal else 2.2)[: 1 + both]
        figure.set_size_inches(look.width, 0.75 + 0.38 * sum(heights))
        grid = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
        panels: list[Axes] = list(grid[:, 0])
        _two_curves(panels[0], look, story, quantity.reference, quantity.run)
        panels[0].set_ylabel(quantity.name)
        if quantity.difference is not None:
            _difference(panels[1], look, quantity)
        _capture_line(panels, look, story)
        panels[-1].set_xlabel("step")
        legend(panels[0], look)

    return draw


def _two_curves(
    axes: Axes, look: Look, story: Story, reference: Series | None, run: Series
) -> None:
    """The run as a thin line inside the other's band, separated by the background colour."""
    palette = look.palette
    if reference is not None:
        name = shortened(story.reference_name)
        _curve(axes, reference, palette.reference, label=name, linewidth=6)
        _curve(axes, run, palette.page, linewidth=3.4)
    _curve(axes, run, palette.run, label=shortened(story.name), linewidth=1.4, marker="o")


def _difference(axes: Axes, look: Look, quantity: Quantity) -> None:
    assert quantity.difference is not None
    axes.set_ylabel("difference")
    if not quantity.unequal:
        axes.axhline(0, color=look.palette.run, linewidth=1.6)
        axes.set_ylim(-1, 1)
        axes.set_yticks([0], ["0"])
        axes.text(
            *(0.5, 0.62),
            "exactly zero at every step",
            transform=axes.transAxes,
            ha="center",
            color=look.palette.ink,
        )
        return
    axes.axhline(0, color=look.palette.muted, linewidth=0.8)
    _curve(axes, quantity.difference, look.palette.bad, linewidth=1.2, marker="x")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def of_step_times(story: Story) -> Draw:
    """Milliseconds of each step, of both runs."""

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 2.9)
        axes = figure.subplots()
        other = story.reference_rank
        reference = step_times(other) if other is not None else None
        run = step_times(story.rank)
        _two_curves(axes, look, story, reference, run)
        axes.set_ylim(0, highest_shown(story))
        axes.set_ylabel("milliseconds")
        axes.set_xlabel("step")
        _capture_line([axes], look, story)
        legend(axes, look)

    return draw


def highest_shown(story: Story) -> float:
    """The upper limit of the plot of step times; much longer steps are above it."""
    found = [step_times(run[min(run)]).finite for _, run in story.runs]
    usual = max((median(times) for times in found if times), default=1.0)
    shown = [time for times in found for time in times if time <= _FAR * usual]
    return 1.1 * max(shown, default=1.0)


def of_memory_over_steps(story: Story) -> Draw:
    """Allocated and reserved memory after each step."""

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 3.0)
        axes = figure.subplots()
        colours = {story.name: look.palette.run, story.reference_name: look.palette.reference}
        for name, run in story.runs:
            record = run[min(run)]
            for key, style in (("reserved", "--"), ("allocated", "-")):
                curve = memory_over_steps(record, f"{key}_bytes")
                if curve.x:
                    label = f"{shortened(name)}, {key}"
                    _curve(axes, curve, colours[name], label=label, linestyle=style, linewidth=1.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("MiB")
        axes.set_xlabel("step")
        _capture_line([axes], look, story)
        legend(axes, look, columns=1 if look.narrow else 2)

    return draw


def of_coverage(found: Coverage) -> Draw:
    """A map of layers and scopes that shows what is in a graph."""

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 1.15 + 0.34 * len(found.scopes))
        axes = figure.subplots()
        palette = look.palette
        few = len(found.layers) <= (_CELLS // 2 if look.narrow else _CELLS)
        kinds: dict[str, dict[str, Any]] = {
            GRAPHED: {"color": palette.run, "edgecolor": palette.run},
            LEFT_OUT: {"color": palette.page, "edgecolor": palette.muted, "hatch": "/////"},
            EAGER: {"color": palette.page, "edgecolor": palette.muted},
        }
        for kind, style in kinds.items():
            cells = [
                (first, count, row)
                for row, scope in enumerate(found.scopes)
                for first, count in found.stretches(scope, kind, 1 if few else len(found.layers))
            ]
            if cells:
                axes.bar(
                    [first - 0.43 for first, _, _ in cells], [0.8] * len(cells),
                    bottom=[row - 0.4 for _, _, row in cells], label=kind, align="edge",
                    width=[count - 0.14 for _, count, _ in cells], linewidth=0.8, **style,
                )  # fmt: skip
        axes.set_yticks(range(len(found.scopes)), found.scopes)
        axes.set_ylim(len(found.scopes) - 0.5, -0.5)
        axes.set_xlim(-0.6, max(len(found.layers) - 0.4, 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6 if look.narrow else 12))
        axes.set_xlabel("layer")
        axes.grid(visible=False)
        legend(axes, look, columns=1 if look.narrow else 3)

    return draw


def of_counters(story: Story) -> Draw:
    """The graphs' work in a step: passes, bytes copied, and the time of votes."""

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 5.4)
        passes, copied, votes = figure.subplots(3, 1, sharex=True)
        palette, record = look.palette, story.rank
        for name, colour, style, mark in (
            ("replayed", palette.run, "-", "o"),
            ("eager", palette.reference, "--", "s"),
            ("mismatched", palette.bad, ":", "x"),
            ("verified", palette.third, "-.", "^"),
        ):
            curve = rates(record, "counters", name)
            _curve(passes, curve, colour, label=name, linestyle=style, marker=mark, linewidth=1.4)
        passes.set_ylabel("passes" if look.narrow else "passes a step")
        legend(passes, look, columns=2 if look.narrow else 4)
        curve = rates(record, "counters", "bytes_copied", 1 / MIB)
        _curve(copied, curve, palette.run, linewidth=1.6, marker="o")
        copied.set_ylabel("MiB copied")
        for name, colour, style in (
            ("waiting_ms", palette.run, "-"),
            ("exchanging_ms", palette.reference, "--"),
        ):
            label = f"votes, {name.removesuffix('_ms')}"
            curve = rates(record, "agreement", name)
            _curve(votes, curve, colour, label=label, linestyle=style, linewidth=1.4)
        votes.set_ylabel("ms" if look.narrow else "ms a step")
        legend(votes, look, columns=1 if look.narrow else 2)
        for axes in (passes, copied, votes):
            axes.set_ylim(bottom=0)
        votes.set_xlabel("step")
        _capture_line([passes, copied, votes], look, story)

    return draw


def _curve(axes: Axes, series: Series, colour: str, marker: str = "", **style: Any) -> None:
    """Points, each with a mark if they are few; a long series is thinned."""
    few = len(series.x) <= _MARKED
    shown = thin(series)
    axes.plot(
        shown.x,
        shown.y,
        color=colour,
        marker=(marker or ("o" if len(series.x) == 1 else "")) if few else "",
        markersize=3.5,
        **style,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def _capture_line(panels: Sequence[Axes], look: Look, story: Story) -> None:
    """Mark where graphs were captured, between two steps; captions explain the mark."""
    captured = story.captured_after
    if captured is None:
        return
    for axes in panels:
        axes.axvline(captured + 0.5, color=look.palette.muted, linewidth=1, linestyle=(0, (2, 2)))
