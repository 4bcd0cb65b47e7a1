"""The plots, with matplotlib: as SVG for the page, in two widths, and as PNG.

Every curve has a line style, marker or label besides its colour.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_cg.tools.pages.bars import legend, shortened
from megatron_cg.tools.pages.figures import Draw, Look
from megatron_cg.tools.report.coverage import EAGER, GRAPHED, LEFT_OUT, Coverage
from megatron_cg.tools.report.series import (
    MIB,
    Curve,
    Quantity,
    memory_over_steps,
    rates,
    step_times,
    thin,
)
from megatron_cg.tools.report.story import Story

_MARKED = 40
"""With at most this many points, each has a mark."""
_CELLS = 64
"""With at most this many layers, each has its own cell; otherwise equal neighbours share one."""
_FAR = 4.0
"""A step time above this multiple of the median is left out of the plot."""


def of_quantity(story: Story, quantity: Quantity) -> Draw:
    """Both runs' curves, one over the other, and their difference below."""
    heights = [5] if quantity.difference is None else [5, 3 if quantity.unequal else 2.2]

    def draw(figure: Figure, look: Look) -> None:
        inches = 0.75 + 0.38 * sum(heights)
        panels = _panels(figure, look, inches, len(heights), height_ratios=heights)
        _two_curves(panels[0], look, story, quantity.reference, quantity.run)
        panels[0].set_ylabel(quantity.name)
        if quantity.difference is not None:
            _difference(panels[1], look, quantity.difference, is_zero=not quantity.unequal)
        _finish(panels, look, story)

    return draw


def _two_curves(axes: Axes, look: Look, story: Story, reference: Curve | None, run: Curve) -> None:
    """The run as a thin line inside the other's band, separated by the background colour."""
    palette = look.palette
    if reference is not None:
        name = shortened(story.reference_name)
        _curve(axes, reference, palette.reference, label=name, linewidth=6)
        _curve(axes, run, palette.page, linewidth=3.4)
    _curve(axes, run, palette.run, label=shortened(story.name), linewidth=1.4, marker="o")


def _difference(axes: Axes, look: Look, difference: Curve, *, is_zero: bool) -> None:
    axes.set_ylabel("difference")
    if is_zero:
        axes.axhline(0, color=look.palette.run, linewidth=1.6)
        axes.set_ylim(-1, 1)
        axes.set_yticks([0], ["0"])
        text = "exactly zero at every step"
        how: dict[str, Any] = {"transform": axes.transAxes, "color": look.palette.ink}
        axes.text(0.5, 0.62, text, ha="center", **how)
        return
    axes.axhline(0, color=look.palette.muted, linewidth=0.8)
    _curve(axes, difference, look.palette.bad, linewidth=1.2, marker="x")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def of_step_times(story: Story) -> Draw:
    """Milliseconds of each step, of both runs."""

    def draw(figure: Figure, look: Look) -> None:
        (axes,) = _panels(figure, look, 2.9)
        *reference, run = (step_times(record) for _, record in story.records)
        _two_curves(axes, look, story, reference[0] if reference else None, run)
        axes.set_ylim(0, highest_shown(story))
        axes.set_ylabel("milliseconds")
        _finish([axes], look, story)

    return draw


def highest_shown(story: Story) -> float:
    """The upper limit of the plot of step times; much longer steps are above it."""
    found = [
        list(filter(math.isfinite, step_times(record).values())) for _, record in story.records
    ]
    usual = max((statistics.median(times) for times in found if times), default=1.0)
    shown = [time for times in found for time in times if time <= _FAR * usual]
    return 1.1 * max(shown, default=1.0)


def of_memory_over_steps(story: Story) -> Draw:
    """Allocated and reserved memory after each step."""

    def draw(figure: Figure, look: Look) -> None:
        (axes,) = _panels(figure, look, 3.0)
        colours = {story.name: look.palette.run, story.reference_name: look.palette.reference}
        for name, record in story.records:
            for key, style in (("reserved", "--"), ("allocated", "-")):
                curve = memory_over_steps(record, f"{key}_bytes")
                if curve:
                    label = f"{shortened(name)}, {key}"
                    _curve(axes, curve, colours[name], label=label, linestyle=style, linewidth=1.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("MiB")
        _finish([axes], look, story, columns=1 if look.narrow else 2)

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
        panels = passes, copied, votes = _panels(figure, look, 5.4, 3)
        palette, record = look.palette, story.rank
        for name, colour, style, mark in (
            ("replayed", palette.run, "-", "o"),
            ("eager", palette.reference, "--", "s"),
            ("mismatched", palette.bad, ":", "x"),
            ("verified", palette.third, "-.", "^"),
        ):
            curve = rates(record, "counters", name)
            _curve(passes, curve, colour, label=name, linestyle=style, marker=mark, linewidth=1.4)
        curve = rates(record, "counters", "bytes_copied", 1 / MIB)
        _curve(copied, curve, palette.run, linewidth=1.6, marker="o")
        for name, colour, style in (
            ("waiting_ms", palette.run, "-"),
            ("exchanging_ms", palette.reference, "--"),
        ):
            label = f"votes, {name.removesuffix('_ms')}"
            curve = rates(record, "agreement", name)
            _curve(votes, curve, colour, label=label, linestyle=style, linewidth=1.4)
        a_step = "" if look.narrow else " a step"
        for axes, text in zip(
            panels, (f"passes{a_step}", "MiB copied", f"ms{a_step}"), strict=True
        ):
            axes.set_ylabel(text)
            axes.set_ylim(bottom=0)
        legend(votes, look, columns=1 if look.narrow else 2)
        _finish(panels, look, story, columns=2 if look.narrow else 4)

    return draw


def _panels(figure: Figure, look: Look, inches: float, count: int = 1, **how: Any) -> list[Axes]:
    """``count`` axes of steps, one above the other, in a figure of that height."""
    figure.set_size_inches(look.width, inches)
    return list(figure.subplots(count, sharex=True, squeeze=False, **how)[:, 0])


def _finish(panels: Sequence[Axes], look: Look, story: Story, columns: int = 2) -> None:
    """Name the steps and the curves, and mark where graphs were captured, between two steps.

    Captions explain the mark.
    """
    panels[-1].set_xlabel("step")
    if story.captured_after is not None:
        at, dotted = story.captured_after + 0.5, (0, (2, 2))
        for axes in panels:
            axes.axvline(at, color=look.palette.muted, linewidth=1, linestyle=dotted)
    legend(panels[0], look, columns=columns)


def _curve(axes: Axes, curve: Curve, colour: str, marker: str = "", **style: Any) -> None:
    """Points, each with a mark if they are few; a long curve is thinned."""
    few = len(curve) <= _MARKED
    alone = "o" if len(curve) == 1 else ""
    shown = thin(curve)
    style |= {"marker": (marker or alone) if few else "", "markersize": 3.5}
    axes.plot(list(shown), list(shown.values()), color=colour, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
