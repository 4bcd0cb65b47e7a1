"""The check of a built site: what is broken, what is loaded from outside, and what is fine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_site import problems

OTHER = '<h1 id="there">B</h1><a href="index.html">back</a>'
FINE = """
<link rel="canonical" href="https://example.org/a.html"><link rel="stylesheet" href="a.css">
<a href="sub/b.html#there">b</a> <a href="#here">h</a> <a href="https://example.org/x">out</a>
<h2 id="here">H</h2><img src="a.svg"><a href="sub/b.html">b</a>
"""


def site(folder: Path, page: str, css: str = "a { color: red }") -> Path:
    (folder / "sub").mkdir()
    files = {"index.html": page, "sub/b.html": OTHER.replace("index", "../index"), "a.css": css}
    for name, text in {**files, "a.svg": "<svg/>"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_whole_site_has_no_problems(tmp_path: Path) -> None:
    assert list(problems(site(tmp_path, FINE))) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="c.html">', "index.html: c.html leads to no file"),
        ('<a href="sub/b.html#nowhere">', "index.html: sub/b.html#nowhere leads to no anchor"),
        ('<a href="#nowhere">', "index.html: #nowhere leads to no anchor"),
        ('<img src="/b.svg">', "index.html: /b.svg leads to no file"),
        ('<script src="https://a.org/a.js">', "index.html: loads https://a.org/a.js from outside"),
        ('<link rel="stylesheet" href="//a.org/f">', "index.html: loads //a.org/f from outside"),
    ],
    ids=["file", "anchor elsewhere", "anchor here", "image", "script", "style sheet"],
)
def test_what_is_broken_is_named(tmp_path: Path, page: str, problem: str) -> None:
    assert list(problems(site(tmp_path, page))) == [problem]


@pytest.mark.parametrize("css", ["@import '//a.org/f.css'", "a { src: url(https://a.org/f) }"])
def test_a_style_sheet_that_loads_from_outside_is_named(tmp_path: Path, css: str) -> None:
    (found,) = problems(site(tmp_path, FINE, css))
    assert found.startswith("a.css: loads ") and "a.org/f" in found


def test_an_empty_site_is_a_problem(tmp_path: Path) -> None:
    assert list(problems(tmp_path)) == [f"{tmp_path} holds no page"]
