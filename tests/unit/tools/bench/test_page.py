"""The page of a benchmark: its headline, its settings, its plots and its links."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.bench.results.bench_page import page, write_page
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.metrics import tables
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.results.summary import summary
from megatron_cg.tools.bench.runs.configurations import (
    DDP_GRAPHS,
    EAGER,
    EXPERTS,
    GRAPHS,
    TORCH_EAGER,
)
from megatron_cg.tools.bench.runs.store import read
from tests.unit.tools.report.test_page import Document

Make = Callable[..., dict[str, Any]]
RESULTS = sorted(Path(__file__).parents[4].glob("benchmarks/results/*/bench.json"))


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are empty, as matplotlib takes half a second for each page."""
    monkeypatch.setattr("megatron_cg.tools.pages.figures._svg", lambda *_: ("0 0 1 1", ""))


def head(*results: dict[str, Any]) -> str:
    (found,) = re.findall(r'<div class="verdict.*?</div>', page(list(results), [], []), re.S)
    return " ".join(found.split())


@pytest.mark.usefixtures("no_drawing")
def test_the_page_says_whether_graphs_are_faster(result: Make) -> None:
    eager = result(EAGER, (100.0,))
    assert 'class="verdict good"' in head(eager, result(GRAPHS, (50.0,)))
    assert "llama: 50.0% less time a step, of one round" in head(eager, result(GRAPHS, (50.0,)))
    assert 'class="verdict bad"' in head(eager, result(GRAPHS, (112.0,)))
    # One round tells no difference that the machine's drift can make.
    assert 'class="verdict note"' in head(eager, result(GRAPHS, (91.0,)))
    rounds = [result(EAGER, (100.0,), round=2), result(GRAPHS, (92.0,), round=2)]
    assert 'class="verdict good"' in head(eager, result(GRAPHS, (91.0,)), *rounds)
    assert "No ratio of graphs" in head(result(GRAPHS), result(DDP_GRAPHS))


@pytest.mark.usefixtures("no_drawing")
def test_graphs_are_compared_with_their_own_baselines(result: Make) -> None:
    made = [result(name) for name in (EAGER, TORCH_EAGER, EXPERTS, GRAPHS)]
    assert f"{GRAPHS} against {EAGER}; {EXPERTS} against {TORCH_EAGER}" in head(*made)
    own = f"for {TORCH_EAGER} and {EXPERTS} it is the ratio to {TORCH_EAGER}"
    assert f"&#34;/ baseline&#34; is the ratio to {EAGER}; {own}." in page(made, [], [])


@pytest.mark.usefixtures("no_drawing")
def test_the_table_is_that_of_the_terminal(result: Make) -> None:
    results = [result(EAGER), result(GRAPHS), result(DDP_GRAPHS)]
    (rows,) = tables(results)
    (table,) = re.findall(r"<table>.*?</table>", page(results, [], []), re.S)[:1]
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", table)
    columns, body = summary(rows)
    assert cells == [*columns, *(cell for row in body for cell in row)]


def test_the_page_has_settings_of_both_sides_and_links(result: Make, tmp_path: Path) -> None:
    eager = result(EAGER, (200.0,) * 3, environment={"CACHE": "<8192>"}, command=["train", "--a"])
    graphs = result(GRAPHS, (100.0,) * 3, environment={"CACHE": "262144"}, command=["train"])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / 'a "b".json').touch()
    text = write_page([eager, graphs], [], tmp_path).read_text(encoding="utf-8")
    document = Document(text)
    assert document.open == [] and "script" not in {name for name, _ in document.attributes}
    assert "<title>Benchmark of llama, 2026-01-01</title>" in text
    assert "fsdp-graphs against fsdp-eager" in text and "50.0% less time a step" in text
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


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_every_result_of_ours_is_shown(path: Path) -> None:
    results = read(path)
    text = as_markdown(results)
    assert "## Runs" in text and "GPU busy ms" in text
    document = Document(page(results, trends(results), []))
    assert document.open == []
