"""Converts a drawing to SVG inside a page, and to PNG files.

Relied on: matplotlib 3.9 to 3.11. Its SVG names clip paths and markers by ``id``, refers to them as
``url(#id)`` and ``xlink:href="#id"``, and keeps text as text if ``svg.fonttype`` is none.
"""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from megatron_cg.files import whole_file
from megatron_cg.tools.report.report_plots import Draw, Look
from megatron_cg.tools.report.theme import LIGHT, STYLED, Palette, as_styled

WIDE, NARROW = 7.4, 3.5
"""Inches: the width of the page's column, and a phone's; text is as large as the page's own."""
_DPI = 200


def as_svg(draw: Draw, name: str, alternative: str) -> str:
    """Two SVG elements, for wide and for narrow pages; the page's style shows one of them.

    Args:
        draw: makes the drawing.
        name: letters, digits and dashes; unique among the plots of the page.
        alternative: a description for readers who do not see the plot.
    """
    return "".join(
        _one_svg(draw, width, f"{name}-{kind}", kind, alternative)
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )


def _one_svg(draw: Draw, width: float, prefix: str, kind: str, alternative: str) -> str:
    written = io.StringIO()
    # No date, and ids from the drawing alone: the same records give the same page.
    with mpl.rc_context(_style(STYLED, **{"svg.fonttype": "none", "svg.hashsalt": prefix})):
        figure = Figure(layout="constrained")
        draw(figure, Look(STYLED, width))
        metadata: dict[str, Any] = {"Date": None, "Creator": None, "Type": None, "Format": None}
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Ids must be unique in the page, but matplotlib repeats them in each plot.
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    head = re.match(r"<svg[^>]*>", text)
    assert head is not None
    view = re.search(r'viewBox="([^"]+)"', head.group())
    assert view is not None
    opening = (
        f'<svg class="{kind}" viewBox="{view[1]}" role="img" aria-label="{escape(alternative)}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return as_styled(opening + text[head.end() :].rstrip()) + "\n"


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
