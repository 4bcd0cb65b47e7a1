"""Horizontal bars for pages: stacked, or side by side. Each has a hatch besides its colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_cg.tools.pages.figures import Draw, Look
from megatron_cg.tools.pages.theme import Palette

LONGEST = 22
"""Maximum length of a name in a plot."""

Bars = Mapping[str, Mapping[str, float]]
"""Values by row, then by the name in the legend. A row need not have every name."""
Marks = Mapping[str, Mapping[str, Sequence[float]]]
"""Further values beside those of :data:`Bars`, as ticks."""


def stacked(bars: Bars, unit: str) -> Draw:
    """One bar for each row, which consists of its values."""

    def draw(figure: Figure, look: Look) -> None:
        figure.set_size_inches(look.width, 0.9 + 0.5 * len(bars))
        axes = figure.subplots()
        left = [0.0] * len(bars)
        for name, (colour, hatch) in _filled(bars, look.palette).items():
            widths = [values.get(name, 0.0) for values in bars.values()]
            axes.barh(
                range(len(bars)), widths, left=left, label=name, color=colour, hatch=hatch,
                edgecolor=look.palette.page, linewidth=1.0, height=0.6,
            )  # fmt: skip
            left = [one + two for one, two in zip(left, widths, strict=True)]
        _finish(figure, axes, bars, unit, look)

    return draw


def side_by_side(
    bars: Bars, unit: str, form: str = "%.0f", marks: Marks = MappingProxyType({})
) -> Draw:
    """A group of bars for each row, with their values in ``form``, and with ``marks`` on them."""

    def draw(figure: Figure, look: Look) -> None:
        filled = _filled(bars, look.palette)
        height = 0.8 / max(1, len(filled))
        figure.set_size_inches(look.width, 0.7 + 0.1 * len(bars) * (1 + 2 * len(filled)))
        axes = figure.subplots()
        for number, (name, (colour, hatch)) in enumerate(filled.items()):
            offset = (number - (len(filled) - 1) / 2) * height
            there = {row: found[name] for row, found in enumerate(bars.values()) if name in found}
            axes.barh(
                [row + offset for row in there], list(there.values()), height=0.95 * height,
                color=colour, hatch=hatch, edgecolor=look.palette.page, label=name,
            )  # fmt: skip
            for row, value in there.items():
                ticks = marks.get(list(bars)[row], {}).get(name, ())
                axes.plot(ticks, [row + offset] * len(ticks), "|", color=look.palette.ink)
                axes.annotate(
                    form % value, (max([value, *ticks]), row + offset), (3, 0),
                    textcoords="offset points", va="center", color=look.palette.ink,
                )  # fmt: skip
        axes.margins(x=0.16)
        _finish(figure, axes, bars, unit, look)

    return draw


def shortened(name: str) -> str:
    """A name that fits a plot; matplotlib hides names that begin with an underscore.

    Long names often differ at their ends, so both ends stay.
    """
    name = name.lstrip("_") or "run"
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}\u2026{name[-half:]}"


def legend(axes: Axes, look: Look, columns: int = 2) -> None:
    """A legend above the axes, if something has a name."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False,
            borderaxespad=0.2, handlelength=2.4, labelcolor=look.palette.ink,
        )  # fmt: skip


def _finish(figure: Figure, axes: Axes, bars: Bars, unit: str, look: Look) -> None:
    axes.set_yticks(range(len(bars)), list(map(shortened, bars)))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        # Of the whole figure, which is wider than the axes.
        columns = 2 if look.narrow else 4
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // columns))
        figure.legend(
            loc="outside upper left", ncols=columns, frameon=False, handlelength=2.4,
            labelcolor=look.palette.ink,
        )  # fmt: skip


def _filled(bars: Bars, palette: Palette) -> dict[str, tuple[str, str]]:
    """The colour and hatch of each name; no two are alike, up to 25 names."""
    names = dict.fromkeys(name for values in bars.values() for name in values)
    colours = [palette.run, palette.reference, palette.third, palette.fourth, palette.muted]
    hatches = ["", "////", "---", "\\\\\\\\", "|||"]
    turned = [
        (colours[at], hatches[(at + turn) % len(hatches)])
        for turn, at in product(range(len(hatches)), range(len(colours)))
    ]
    return {name: turned[number % len(turned)] for number, name in enumerate(names)}
