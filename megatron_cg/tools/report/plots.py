"""The plots, with matplotlib: PNG files inside the page, on white in light and dark."""

from __future__ import annotations

import base64
import io
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_cg.tools.report.story import (
    Curve,
    Quantity,
    Story,
    memory_over_steps,
    step_times,
)

_RUN, _REFERENCE, _BAD, _MUTED = "#0072b2", "#c05200", "#a5260f", "#525b66"
_FAR = 4.0
"""A step time above this multiple of the median is left out of the plot."""
_STYLE: Any = {
    "agg.path.chunksize": 10_000,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#d5dae0",
    "text.parse_math": False,
}


def plotted(draw: Callable[[Figure], None]) -> str:
    """What is drawn on an empty figure, as the address of an image in the page."""
    # Not of pyplot, which would keep each figure.
    with mpl.rc_context(_STYLE):
        figure = Figure(layout="constrained", figsize=(7.4, 2.9))
        draw(figure)
        return "data:image/png;base64," + base64.b64encode(png(figure)).decode()


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=160, metadata={"Software": None})
    return written.getvalue()


def losses(story: Story, quantity: Quantity, figure: Figure) -> None:
    """Both runs' curves, one over the other, and their difference below."""
    ratios = [5] if quantity.difference is None else [5, 3]
    figure.set_figheight(0.75 + 0.38 * sum(ratios))
    grid = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
    panels: list[Axes] = list(grid[:, 0])
    _two_curves(panels[0], story, quantity.reference, quantity.run)
    panels[0].set_ylabel(quantity.name)
    if quantity.difference is not None:
        panels[1].set_ylabel("difference")
        panels[1].axhline(0, color=_MUTED, linewidth=0.8)
        _curve(panels[1], quantity.difference, _BAD if quantity.unequal else _RUN, marker="x")
        if quantity.unequal:
            panels[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        else:
            panels[1].set_ylim(-1, 1)
            panels[1].set_yticks([0], ["exactly 0"])
    _finish(panels, story)


def times(story: Story, figure: Figure) -> None:
    """Milliseconds of each step, of both runs."""
    axes = figure.subplots()
    *reference, run = (step_times(record) for _, record in story.records)
    _two_curves(axes, story, reference[0] if reference else None, run)
    axes.set_ylim(0, highest_shown(story))
    axes.set_ylabel("milliseconds")
    _finish([axes], story)


def highest_shown(story: Story) -> float:
    """The upper limit of the plot of step times; much longer steps are above it."""
    found = [
        list(filter(math.isfinite, step_times(record).values())) for _, record in story.records
    ]
    usual = max((statistics.median(ms) for ms in found if ms), default=1.0)
    return 1.1 * max((one for ms in found for one in ms if one <= _FAR * usual), default=1.0)


def memory(story: Story, figure: Figure) -> None:
    """Allocated and reserved memory after each step."""
    axes = figure.subplots()
    colours = {story.name: _RUN, story.reference_name: _REFERENCE}
    for name, record in story.records:
        for key, style in (("reserved", "--"), ("allocated", "-")):
            if curve := memory_over_steps(record, f"{key}_bytes"):
                label = f"{_shown(name)}, {key}"
                _curve(axes, curve, colours[name], label=label, linestyle=style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
    _finish([axes], story)


def _two_curves(axes: Axes, story: Story, reference: Curve | None, run: Curve) -> None:
    """The run as a thin line inside the other's band, separated by the background's colour."""
    if reference is not None:
        _curve(axes, reference, _REFERENCE, label=_shown(story.reference_name), linewidth=6)
        _curve(axes, run, "white", linewidth=3.4)
    _curve(axes, run, _RUN, label=_shown(story.name), linewidth=1.4, marker="o")


def _curve(axes: Axes, curve: Curve, colour: str, marker: str = "", **style: Any) -> None:
    """Points, each with a mark if they are few."""
    alone = "o" if len(curve) == 1 else ""
    style |= {"marker": (marker or alone) if len(curve) <= 40 else "", "markersize": 3.5}
    axes.plot(list(curve), list(curve.values()), color=colour, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _finish(panels: Sequence[Axes], story: Story) -> None:
    """Name the steps and the curves, and mark where graphs were captured, between two steps."""
    panels[-1].set_xlabel("step")
    if story.captured_after is not None:
        for axes in panels:
            axes.axvline(story.captured_after + 0.5, color=_MUTED, linewidth=1, linestyle=":")
    if panels[0].get_legend_handles_labels()[1]:
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)


def _shown(name: str) -> str:
    """A name for a legend; matplotlib hides names that begin with an underscore."""
    return name.lstrip("_")[-30:] or "run"
