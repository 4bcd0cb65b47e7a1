"""The plots, with matplotlib: PNG files inside the page, on white in light and dark."""

import base64
import io
import math
import warnings
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_cg.tools.report.story import Curve, Quantity, Story

_RUN, _REFERENCE, _BAD, _MUTED = "#0072b2", "#c05200", "#a5260f", "#525b66"
_STYLE: Any = {
    "agg.path.chunksize": 10_000,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#d5dae0",
    "text.parse_math": False,
}


def plotted(story: Story, quantity: Quantity, top: float | None = None) -> str:
    """The quantity's plot, from 0 to ``top`` if that is given, as the address of an image."""
    # Not of pyplot, which would keep each figure. A font may lack a glyph of a name.
    with mpl.rc_context(_STYLE), warnings.catch_warnings(action="ignore"):
        figure = Figure(layout="constrained")
        _draw(story, quantity, top, figure)
        return "data:image/png;base64," + base64.b64encode(png(figure)).decode()


def png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=160, metadata={"Software": None})
    return written.getvalue()


def _draw(story: Story, quantity: Quantity, top: float | None, figure: Figure) -> None:
    ratios = [5, 3] if quantity.values else [5]
    figure.set_size_inches(7.4, 0.75 + 0.38 * sum(ratios))
    grid = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
    panels: list[Axes] = list(grid[:, 0])
    for name, curve in quantity.curves.items():
        # The run is a thin line inside the reference's band.
        colour, wide = (_RUN, 1.4) if name == story.name else (_REFERENCE, 6)
        # matplotlib hides names that begin with an underscore.
        label = name.lstrip("_")[-30:] or "run"
        _curve(panels[0], curve, color=colour, linewidth=wide, label=label)
    panels[0].set_ylabel(quantity.name)
    panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    if top is not None:
        panels[0].set_ylim(0, top)
    for axes in panels[1:]:
        axes.set_ylabel("difference")
        _curve(axes, quantity.difference, color=_BAD if quantity.unequal else _RUN)
        if not quantity.unequal:
            axes.set_ylim(-1, 1)
            axes.set_yticks([0], ["exactly 0"])
    panels[-1].set_xlabel("step")
    for axes in panels if story.captured_after is not None else ():
        axes.axvline((story.captured_after or 0) + 0.5, color=_MUTED, linewidth=1, linestyle=":")


def _curve(axes: Axes, curve: Curve, **style: Any) -> None:
    marker = "o" if len(curve) <= 40 else ""
    # matplotlib's arithmetic overflows near the largest numbers.
    heights = [height if abs(height) < 1e100 else math.nan for height in curve.values()]
    axes.plot(list(curve), heights, marker=marker, markersize=3.5, **style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
