"""Colours for plots, both in a page that follows the reader's colour scheme and in PNG files.

In a page, plots use names of the page's style instead of fixed colours, so one drawing suits light
and dark mode. It is drawn in placeholder colours, which :func:`as_styled` replaces. The hues come
from the palette of Okabe and Ito, which is distinguishable with every kind of colour blindness. The
shades keep a contrast of 3:1 against the page; text keeps 4.5:1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Palette:
    """One colour for each meaning, as ``#rrggbb``."""

    page: str
    """The background."""
    panel: str
    """The background of boxes."""
    ink: str
    muted: str
    """Secondary text."""
    grid: str
    run: str
    reference: str
    third: str
    fourth: str
    bad: str
    good: str


LIGHT = Palette(
    page="#ffffff",
    panel="#f4f6f8",
    ink="#16191d",
    muted="#525b66",
    grid="#d5dae0",
    run="#0072b2",
    reference="#c05200",
    third="#00795a",
    fourth="#9a3f7a",
    bad="#a5260f",
    good="#0b6b3a",
)
DARK = Palette(
    page="#14171b",
    panel="#1e2329",
    ink="#eceff2",
    muted="#aab4bf",
    grid="#39424c",
    run="#56b4e9",
    reference="#f0a33a",
    third="#2fc79b",
    fourth="#e08cc0",
    bad="#ff9a85",
    good="#5fd68f",
)
_NAMES = tuple(field.name for field in fields(Palette))
STYLED = Palette(**{name: f"#00fe{number:02x}" for number, name in enumerate(_NAMES)})
"""The placeholder colours; no plot uses them otherwise."""


def variables(palette: Palette) -> str:
    """The palette as custom properties of CSS."""
    return " ".join(f"--{name}: {getattr(palette, name)};" for name in _NAMES)


def as_styled(svg: str) -> str:
    """``svg``, drawn in :data:`STYLED`, with the page's properties instead of placeholders."""
    names = {getattr(STYLED, name): name for name in _NAMES}
    return re.sub(r"#00fe[0-9a-f]{2}\b", lambda found: f"var(--{names[found[0]]})", svg)
