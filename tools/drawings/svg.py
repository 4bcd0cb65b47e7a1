"""A few shapes as SVG, readable on a light and on a dark ground.

Colours are CSS variables of the class ``drawing``. An SVG on its own follows the system's scheme;
inside a page of the site, docs/assets/extra.css sets the same variables by the page's scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LINE = 17.0
"""Distance of two lines of text, in user units; text is 13 units high."""
_EM = 13.0
_WIDEST = 0.56
"""An upper estimate of a letter's mean width in em, for the sans-serif fonts of browsers."""

STYLE = """
.drawing{--ink:#1f2430;--soft:#5b6475;--line:#9aa3b2;--hook:#f6d9a8;--host:#dfe3ea;--gpu:#bcd4f5;
--gather:#bfe3c9;--reduce:#dccbf0;--graph:#8fc7d6;--guard:#f3c0bd;--note:#f2f4f8}
@media(prefers-color-scheme:dark){.drawing{--ink:#e8ebf2;--soft:#a9b2c3;--line:#6d7789;
--hook:#7a5c1f;--host:#3b4252;--gpu:#2d517f;--gather:#2f6540;--reduce:#5b4380;--graph:#1d6475;
--guard:#84403c;--note:#262b36}}
.drawing text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
.drawing .head{font-weight:600}.drawing .soft{fill:var(--soft)}
.drawing rect,.drawing path.shape{stroke:var(--line);stroke-width:1}
.drawing .rule{stroke:var(--line);stroke-width:1;fill:none}
.drawing .dash{stroke-dasharray:4 4}
""".strip()

KINDS = ("hook", "host", "gpu", "gather", "reduce", "graph", "guard", "note")
"""What a shape can be filled with; each is a colour of :data:`STYLE`."""


def text_width(text: str) -> float:
    """An upper estimate of a line's width in user units."""
    return len(text) * _EM * _WIDEST


class LabelTooWideError(ValueError):
    """A label that would stick out of its shape."""


class Drawing:
    """An SVG of ``width`` by ``height`` user units.

    Args:
        title: what the drawing shows, in a sentence; read out instead of the drawing.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, lines: str | Sequence[str], *, style: str = "", anchor: str = ""
    ) -> None:
        """Lines of text, the first with its baseline at ``y``."""
        rows = lines.split("\n") if isinstance(lines, str) else lines
        cls = f' class="{style}"' if style else ""
        at = f' text-anchor="{anchor}"' if anchor else ""
        for number, row in enumerate(rows):
            self._parts.append(
                f'<text x="{_n(x)}" y="{_n(y + number * LINE)}"{cls}{at}>{escape(row)}</text>'
            )

    def box(
        self, x: float, y: float, width: float, height: float, label: str, *, kind: str = "note"
    ) -> None:
        """A filled box, its label in the middle.

        Raises LabelTooWideError for a label that does not fit.
        """
        rows = label.split("\n") if label else []
        self._check_fits(rows, width, height)
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="3" '
            f'fill="var(--{_known(kind)})"/>'
        )
        top = y + height / 2 - (len(rows) - 1) * LINE / 2 + _EM * 0.35
        self.text(x + width / 2, top, rows, anchor="middle")

    def diamond(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A question, its label in the middle; raises as :meth:`box` does."""
        rows = label.split("\n")
        self._check_fits(rows, width * 0.72, height)
        middle, centre = x + width / 2, y + height / 2
        points = ((middle, y), (x + width, centre), (middle, y + height), (x, centre))
        path = "M" + " L".join(f"{_n(a)} {_n(b)}" for a, b in points) + " Z"
        self._parts.append(f'<path class="shape" d="{path}" fill="var(--note)"/>')
        self.text(middle, centre - (len(rows) - 1) * LINE / 2 + _EM * 0.35, rows, anchor="middle")

    def line(self, points: Sequence[tuple[float, float]], *, dash: bool = False) -> None:
        """A line through the points."""
        self._path(points, dash=dash)

    def arrow(self, points: Sequence[tuple[float, float]], *, dash: bool = False) -> None:
        """A line through the points with a head at its end; its last part is along an axis."""
        self._path(points, dash=dash)
        (x0, y0), (x1, y1) = points[-2:]
        along_x = abs(x1 - x0) >= abs(y1 - y0)
        sign = 1.0 if (x1 - x0 if along_x else y1 - y0) > 0 else -1.0
        back, side = 8.0 * sign, 4.0
        if along_x:
            corners = ((x1, y1), (x1 - back, y1 - side), (x1 - back, y1 + side))
        else:
            corners = ((x1, y1), (x1 - side, y1 - back), (x1 + side, y1 - back))
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}" fill="var(--soft)"/>')

    def _path(self, points: Iterable[tuple[float, float]], *, dash: bool) -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        cls = "rule dash" if dash else "rule"
        self._parts.append(f'<polyline class="{cls}" points="{path}"/>')

    def _check_fits(self, rows: Sequence[str], width: float, height: float) -> None:
        for row in rows:
            if text_width(row) > width or len(rows) * LINE > height + 4:
                raise LabelTooWideError(
                    f"{self.title}: {row!r} needs {text_width(row):.0f} of {width:.0f} units, and "
                    f"{len(rows)} lines {len(rows) * LINE:.0f} of {height:.0f}"
                )

    def render(self) -> str:
        """The SVG as text."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" '
            f'height="{_n(self.height)}">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n{body}\n</svg>\n"
        )


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    return kind


def _n(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
