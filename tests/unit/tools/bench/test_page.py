"""The page of a benchmark: its headline, its settings, its plots and its links."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.bench.configurations import DDP_GRAPHS, EAGER, GRAPHS
from megatron_cg.tools.bench.metrics import tables
from megatron_cg.tools.bench.page import page, write_page
from megatron_cg.tools.bench.scaling import trends
from megatron_cg.tools.bench.store import LEFT_OUT, read
from megatron_cg.tools.bench.summary import headline
from tests.unit.tools.report.test_browser import FIGURES, LOW_CONTRAST, TOO_WIDE, tab
from tests.unit.tools.report.test_page import Document

Make = Callable[..., dict[str, Any]]
RESULTS = sorted(Path(__file__).parents[4].glob("benchmarks/results/*/bench.json"))
__all__ = ["tab"]


def verdicts(*results: dict[str, Any]) -> list[str]:
    (rows,) = tables(results)
    return [row[-1] for row in headline(rows)]


def test_the_headline_has_step_ratio_memory_and_verdict(result: Make) -> None:
    (rows,) = tables([result(EAGER, (200.0,) * 3), result(GRAPHS, (100.0,) * 3)])
    assert headline(rows) == [
        [EAGER, "200.0", "1.000", "1,000", "1.000", "the baseline"],
        [GRAPHS, "100.0", "0.500", "1,000", "1.000", "faster by a factor of 2.00 in one round"],
    ]


def test_one_round_tells_no_difference_that_a_drift_can_make(result: Make) -> None:
    eager = result(EAGER, (100.0,))
    near, far = result(GRAPHS, (91.0,)), result(DDP_GRAPHS, (112.0,))
    assert verdicts(eager, near, far)[1:] == [
        "no clear difference in one round",
        "slower by a factor of 1.12 in one round",
    ]


def test_rounds_must_agree(result: Make) -> None:
    eager = [result(EAGER, (100.0,), round=number) for number in (1, 2)]
    all_faster = [result(GRAPHS, (90.0 + number,), round=number) for number in (1, 2)]
    mixed = [result(DDP_GRAPHS, (97.0 + 2 * number,), round=number) for number in (1, 2)]
    assert verdicts(*eager, *all_faster, *mixed)[1:] == [
        "faster by a factor of 1.09 in each of 2 rounds",
        "no clear difference in 2 rounds",
    ]


def test_without_a_ratio_the_verdict_says_why(result: Make) -> None:
    alone = result(GRAPHS, invocation="two")
    assert verdicts(result(EAGER), alone)[1] == "not run side by side with the baseline"
    left = result(EAGER, status=LEFT_OUT, error="no time is left", ranks=[])
    assert verdicts(left, result(GRAPHS)) == ["not measured", "the baseline was not measured"]
    assert "No ratio was measured" in page([left, result(GRAPHS)], [], [])
    # Where eager was not run, the first configuration is the baseline.
    assert verdicts(result(GRAPHS, (100.0,)), result(DDP_GRAPHS, (200.0,))) == [
        "the baseline",
        "slower by a factor of 2.00 in one round",
    ]


def test_the_page_has_settings_of_both_sides_and_links(result: Make, tmp_path: Path) -> None:
    eager = result(EAGER, (200.0,) * 3, environment={"CACHE": "<8192>"}, command=["train", "--a"])
    graphs = result(GRAPHS, (100.0,) * 3, environment={"CACHE": "262144"}, command=["train"])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / 'a "b".json').touch()
    text = write_page([eager, graphs], [], tmp_path).read_text(encoding="utf-8")
    document = Document(text)
    assert document.open == [] and "script" not in {name for name, _ in document.attributes}
    assert "<title>Benchmark of llama, 2026-01-01</title>" in text
    assert "llama: fsdp-graphs against fsdp-eager: faster by a factor of 2.00 in one round" in text
    different = text.partition("Different in the two runs")[2].partition("</table>")[0]
    assert "&lt;8192&gt;" in different and "262144" in different and "torch" not in different
    assert "<p>Only there: <code>--a</code></p>" in text
    links = [a["href"] for a in document.of("a") if not a["href"].startswith("#")]
    assert links == ["bench.json", "runs/a%20%22b%22.json"]
    assert len(document.of("figure")) == 3


def test_without_matplotlib_the_page_has_no_plots(
    result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "<figure>" not in page([result(EAGER), result(GRAPHS)], [], [])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_every_result_of_ours_has_a_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = read(path)
    monkeypatch.setattr("megatron_cg.tools.pages.figures._svg", lambda *_: ("0 0 1 1", ""))
    document = Document(page(results, trends(results), []))
    assert document.open == []


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_is_whole_in_a_browser(result: Make, tmp_path: Path, tab: Any, width: int) -> None:
    grown = [result(GRAPHS, (n,), layers=n, dimension="layers") for n in (4, 8)]
    results = [result(EAGER), result(GRAPHS), result(DDP_GRAPHS), *grown]
    path = write_page(results, trends(results), tmp_path)
    tab.show(path, width, "dark")
    tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(TOO_WIDE) == []
    figures = tab.evaluate(FIGURES)
    assert len(figures) == 4
    for figure in figures:
        assert figure["shown"] == 1 and figure["letters"] >= 11.5 and figure["cut"] == []
    assert tab.evaluate(LOW_CONTRAST)["low"] == []
    assert tab.requests == [path.as_uri()] and tab.problems == []
    assert not re.search(r"#00fe[0-9a-f]{2}", path.read_text(encoding="utf-8"))
