"""The page in a real browser without a network, wide and on a phone, in light and in dark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tools.report.browser import Tab, find_chromium, open_tab

VIEWS = [(width, scheme) for width in (1280, 360) for scheme in ("light", "dark")]

FIGURES = """
[...document.querySelectorAll("figure")].map(figure => {
  const seen = [...figure.querySelectorAll("svg")].filter(svg => svg.checkVisibility());
  const box = seen[0]?.getBoundingClientRect();
  const texts = seen[0] ? [...seen[0].querySelectorAll("text")] : [];
  return {
    shown: seen.length,
    width: box?.width ?? 0,
    height: box?.height ?? 0,
    letters: Math.min(...texts.map(text => {
      const matrix = text.getScreenCTM();
      return parseFloat(getComputedStyle(text).fontSize) * Math.hypot(matrix.a, matrix.b);
    })),
    cut: texts.filter(text => {
      const inner = text.getBoundingClientRect();
      return inner.left < box.left - 1 || inner.right > box.right + 1;
    }).map(text => text.textContent),
  };
})
"""

LOW_CONTRAST = """
(() => {
  const parse = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = [];
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const [high, less] = [luminance(ink), luminance(behind(element))].sort((a, b) => b - a);
    texts += 1;
    if ((high + 0.05) / (less + 0.05) < 4.5) low.push(walker.currentNode.textContent);
  }
  return {texts, low};
})()
"""

TOO_WIDE = """
[...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility())
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map(e => `${e.tagName} ${e.className.baseVal ?? e.className}`)
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        reason = "there is no Chromium: apt-get install chromium"
        if os.environ.get("MEGATRON_CG_BROWSER") == "required":
            pytest.fail(f"MEGATRON_CG_BROWSER=required, and {reason}")
        pytest.skip(reason)
    with open_tab(chromium, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(made_up_page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(made_up_page, encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_page_is_whole_in_a_browser(tab: Tab, written: Path, width: int, scheme: str) -> None:
    tab.show(written, width, scheme)
    tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(TOO_WIDE) == []
    figures = tab.evaluate(FIGURES)
    assert len(figures) == 10
    for figure in figures:
        assert figure["shown"] == 1
        assert figure["width"] > 0.85 * min(width, 800) - 32 and figure["height"] > 80
        assert figure["letters"] >= 11.5
        assert figure["cut"] == []
    contrast = tab.evaluate(LOW_CONTRAST)
    assert contrast["texts"] > 200 and contrast["low"] == []
    assert tab.requests == [written.as_uri()]
    assert tab.problems == []


def test_light_and_dark_are_the_readers_choice(tab: Tab, written: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('svg.wide text')).fill"
    found = {}
    for scheme in ("light", "dark"):
        tab.show(written, 1280, scheme)
        found[scheme] = tab.evaluate(background), tab.evaluate(line)
    assert found["light"] == ("rgb(255, 255, 255)", "rgb(22, 25, 29)")
    assert found["dark"] == ("rgb(20, 23, 27)", "rgb(236, 239, 242)")


def test_it_prints_in_light_also_for_a_reader_of_dark_pages(tab: Tab, written: Path) -> None:
    tab.show(written, 360, "dark", media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("document.querySelector('nav').checkVisibility()") is False
    assert all(f["shown"] == 1 for f in tab.evaluate(FIGURES))
    printed = tab.call("Page.printToPDF")
    assert printed["data"].startswith("JVBERi")  # %PDF


def test_a_page_that_asks_for_more_or_is_too_wide_is_found_out(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    head = "<meta name='viewport' content='width=device-width'><body style='background: #fff'>"
    body = "<img src='other.png'><p style='color: #aaa; width: 900px'>text</p>"
    path.write_text(f"{head}{body}<script>console.log('x'); missing()</script>")
    tab.show(path, 360, "light")
    assert len(tab.requests) == 2
    assert len(tab.problems) >= 2
    assert tab.evaluate(TOO_WIDE) and tab.evaluate(LOW_CONTRAST)["low"] == ["text"]
