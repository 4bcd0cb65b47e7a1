"""Drawings: committed as they are drawn, with readable labels in both colour schemes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.drawings.__main__ import DRAWINGS, FOLDER
from tools.drawings.svg import KINDS, STYLE, Drawing, LabelTooWideError
from tools.drawings.timeline import Span, timeline

CSS = (FOLDER.parent / "assets" / "extra.css").read_text(encoding="utf-8")
VARIABLE = re.compile(r"--(\w+):\s*(#[0-9a-f]{6})")
READABLE = 4.5
"""The contrast that WCAG 2.2 asks for of text (success criterion 1.4.3, level AA)."""


def schemes(text: str, light: str, dark: str) -> dict[str, dict[str, str]]:
    """The variables of each scheme, from the text between its name and the next brace."""
    return {
        name: dict(VARIABLE.findall(text.split(start, 1)[1].split("}", 1)[0]))
        for name, start in (("light", light), ("dark", dark))
    }


IN_FILES = schemes(STYLE, ".drawing{", "dark){.drawing{")
IN_PAGES = schemes(CSS, '"default"] .drawing', '"slate"] .drawing')


def luminance(colour: str) -> float:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    red, green, blue = (linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_committed_as_it_is_drawn(name: str) -> None:
    drawn = DRAWINGS[name]().render()
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, (
        "python -m tools.drawings writes them"
    )


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_svg_with_a_title_and_within_its_frame(name: str) -> None:
    root = ElementTree.fromstring(DRAWINGS[name]().render())
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_no_drawing_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(DRAWINGS)


def test_pages_have_the_colours_of_the_files() -> None:
    assert IN_PAGES == IN_FILES
    assert set(IN_FILES["light"]) == {*KINDS, "ink", "soft", "line"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_are_readable_on_every_colour(scheme: str) -> None:
    colours = IN_FILES[scheme]
    ground = {"light": "#ffffff", "dark": "#1e2129"}[scheme]
    assert all(contrast(colours["ink"], colours[kind]) >= READABLE for kind in KINDS)
    assert min(contrast(colours["ink"], ground), contrast(colours["soft"], ground)) >= READABLE


def test_a_label_that_sticks_out_is_an_error() -> None:
    drawing = Drawing(100, 50, "title")
    with pytest.raises(LabelTooWideError, match="'too wide for this'"):
        drawing.box(0, 0, 60, 40, "too wide for this")
    with pytest.raises(LabelTooWideError, match="3 lines"):
        drawing.box(0, 0, 90, 40, "a\nb\nc")


def test_a_colour_or_a_lane_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="'pink' is none of hook"):
        Drawing(100, 50, "title").box(0, 0, 60, 40, "a", kind="pink")
    with pytest.raises(KeyError, match="host"):
        timeline("title", ["stream"], [], [Span("host", 0, 10, "", "gpu")])
