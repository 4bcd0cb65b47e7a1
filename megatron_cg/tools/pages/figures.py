"""Figures of pages: a drawing as SVG inside a page, and as a PNG file.

Relied on: matplotlib 3.9 to 3.11. Its SVG names clip paths and markers by ``id``, refers to them as
``url(#id)`` and ``xlink:href="#id"``, and keeps text as text if ``svg.fonttype`` is none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from megatron_cg.files import whole_file
from megatron_cg.tools.pages.theme import LIGHT, STYLED, Palette, as_styled

WIDE, NARROW = 7.4, 3.5
"""Inches: the width of the page's column, and a phone's; text is as large as the page's own."""
_DPI = 200


@dataclass(frozen=True)
class Look:
    """How a plot is drawn: colours, and the width of a page's column in inches."""

    palette: Palette
    width: float

    @property
    def narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < 5


Draw = Callable[[Figure, Look], None]
"""Draws on an empty figure of the look's width and sets its height."""


@dataclass(frozen=True)
class Svg:
    """What is inside an SVG element, for pages of one ``kind``: ``wide`` or ``narrow``."""

    kind: str
    view: str
    """The ``viewBox``."""
    body: str


@dataclass(frozen=True)
class Plot:
    """A plot of a page; ``name`` has letters, digits and dashes and is unique in the page."""

    name: str
    draw: Draw

    def svgs(self) -> tuple[Svg, ...]:
        """The plot for wide and for narrow pages; the page's style shows one of them."""
        widths = {"wide": WIDE, "narrow": NARROW}
        return tuple(
            Svg(kind, *_svg(self.draw, width, f"{self.name}-{kind}"))
            for kind, width in widths.items()
        )


def _svg(draw: Draw, width: float, prefix: str) -> tuple[str, str]:
    """The view box and the content, all ids with ``prefix``."""
    written = io.StringIO()
    # No date, and ids from the drawing alone: the same records give the same page.
    with mpl.rc_context(_style(STYLED, **{"svg.fonttype": "none", "svg.hashsalt": prefix})):
        figure = Figure(layout="constrained")
        draw(figure, Look(STYLED, width))
        metadata: dict[str, Any] = {"Date": None, "Creator": None, "Type": None, "Format": None}
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    found = re.search(r"<svg[^>]*viewBox=\"([^\"]+)\"[^>]*>(.*)</svg>", written.getvalue(), re.S)
    assert found is not None
    text = re.sub(r"<metadata>.*?</metadata>", "", found[2], flags=re.S)
    # Ids must be unique in the page, but matplotlib repeats them in each plot.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", text)
    return found[1], as_styled(text.strip())


def write_png(draw: Draw, path: Path) -> None:
    """Write the wide plot as a PNG file with a white background."""
    with mpl.rc_context(_style(LIGHT)), whole_file(path) as part:
        figure = Figure(layout="constrained")
        draw(figure, Look(LIGHT, WIDE))
        figure.savefig(part, format="png", dpi=_DPI, metadata={"Software": None})


def _style(palette: Palette, **more: Any) -> Any:
    """Matplotlib's settings in the palette's colours, with ``more`` settings."""
    return {
        **more,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.facecolor": "none",
        "figure.facecolor": palette.page,
        "savefig.facecolor": palette.page,
        "text.color": palette.ink,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.muted,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "xtick.labelcolor": palette.ink,
        "ytick.labelcolor": palette.ink,
        "grid.color": palette.grid,
        "grid.linewidth": 0.7,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.6,
        "hatch.linewidth": 0.8,
        "text.parse_math": False,
        "legend.fontsize": 9,
        "path.simplify": True,
    }
