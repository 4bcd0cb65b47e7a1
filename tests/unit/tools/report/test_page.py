"""The page as a document: whole, loading nothing, and saying what the records hold."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.cli.main import main
from megatron_cg.tools.report import plots
from megatron_cg.tools.report.report_page import page
from megatron_cg.tools.report.story import Story, read_story
from tests.unit.tools.report.made_up import MISMATCH, make_record, write

_VOID = {"meta", "br", "img", "use", "path", "rect", "line"}
PNG = b"\x89PNG\r\n\x1a\n"


class Document(HTMLParser):
    """What elements there are, that each is closed, and the text of each by name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.attributes if name == tag]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and not written as files, which takes most of the time."""
    monkeypatch.setattr(plots, "png", lambda _figure: b"")


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", text)


def test_the_page_of_two_real_runs(tape_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tape_pair)]) == 0
    assert capsys.readouterr().out == f"written: {tape_pair}/report.html\n"
    text = (tape_pair / "report.html").read_text()
    document = Document(text)
    assert document.open == []
    assert "Identical, to the last bit" in text
    assert "The difference is exactly zero at every step" in text
    assert "3 layers" in text and "<td>attn, mlp</td>" in text
    assert "times mean nothing for a GPU" in text
    names = ["Losses and gradient norm", "Step times", "What was captured"]
    assert headings(text) == [*names, "Versions, machine and flags"]
    assert re.search(r"<h1>tape, 20\d\d-\d\d-\d\d</h1>", text)
    images = document.of("img")
    assert len(images) == 3 and all(len(image["alt"]) > 30 for image in images)
    for image in images:
        assert base64.b64decode(image["src"].partition("base64,")[2]).startswith(PNG)


def test_a_page_of_all_that_a_record_can_hold_loads_nothing(made_up: Path, undrawn: None) -> None:
    text = page(read_story(made_up))
    assert headings(text) == [
        *("Mismatches and faults", "Different", "Losses and gradient norm", "Step times"),
        *("GPU memory", "What was captured", "Versions, machine and flags"),
    ]
    document = Document(text)
    names = {name for name, _ in document.attributes}
    assert not names & {"script", "link", "iframe", "object", "embed", "video"}
    assert all(image["src"].startswith("data:") for image in document.of("img"))
    assert not re.findall(r"https?:|@import", text) and "default-src 'none'" in text
    assert "Median step: graphs 102.0 ms, eager 152.0 ms, a ratio of 0.671 (steps 7 to 40" in text
    assert "longer than the picture is high: 2." in text
    assert "24 graphs of 24 layers in 2.47 s" in text and "highest 26,300 MiB" in text
    assert "eager 26000 MiB, graphs 26900 MiB, a ratio of 1.035" in text
    assert "2 not allowed by a guard" in text
    rows = re.findall(r"<tr><td>(layer[^<]*)</td><td>\w+</td><td>([^<]*)</td><td>([^<]*)<", text)
    not_asked = "not asked for (--cuda-graph-modules)"
    assert rows == [
        ("layer 0 to 1", "attn", f"mlp: {not_asked}"),
        ("layer 2 to 19", "attn, moe_router", f"moe, moe_preprocess: {not_asked}"),
        (
            "layer 20 to 23",
            "moe_router",
            f"attn: not selected (--cg-layers); moe, moe_preprocess: {not_asked}",
        ),
    ]


def test_numbers_and_shards_that_differ_are_listed(undrawn: None) -> None:
    run, reference = make_record(off=17), make_record(graphs=False)
    run["parameters"] = {f"main:w{number}": "b" for number in range(30)}
    text = page(Story("pair", {0: run}, reference={0: reference}))
    assert 'class="verdict bad"' in text and "First difference at step 17" in text
    assert "24 of 120 numbers and 31 parameter shards" in text and "the first 20" in text
    assert len(re.findall(r"<td>lm loss</td>", text)) == 20
    assert len(re.findall(r"<td>rank 0 main:w", text)) == 20
    # A run that failed lacks every later number, which is no difference of its own.
    failed = make_record(steps=6) | {"finished": False, "error": "RuntimeError: on purpose"}
    text = page(Story("pair", {0: failed}, reference={0: make_record(graphs=False)}))
    assert "Different" not in headings(text) and "RuntimeError: on purpose" in text


def test_text_of_a_run_cannot_become_markup(undrawn: None) -> None:
    record = make_record(steps=2)
    record["events"].append({"after_step": 1, "level": "warning", "text": MISMATCH})
    record["error"] = record["command"][0] = '</p><script>alert("x")</script>'
    for step in record["steps"]:
        step["losses"] = {'<b onload="x">$^': step["losses"]["lm loss"]}
    odd = page(Story("<title>", {0: record}, name="__<i>" + "long" * 20))
    document = Document(odd)
    assert document.open == [] and {"script", "i", "b"}.isdisjoint(
        n for n, _ in document.attributes
    )
    assert "argument &lt;hidden&gt; &amp; co" in odd


def test_a_run_without_a_step_has_a_page(undrawn: None) -> None:
    record = make_record(steps=0, graphs=False) | {"finished": False}
    text = page(Story("none", {0: record}))
    assert "No step has ended" in text and headings(text) == [
        "Losses and gradient norm",
        "Versions, machine and flags",
    ]


def test_settings_that_differ_come_first(undrawn: None) -> None:
    run, other = make_record(), make_record()
    for layer in other["captures"][-1]["coverage"]:
        layer["graphed"] = ["attn"]
    text = page(Story("x", {0: run}, reference={0: other}))
    first = re.search(r"<th>what</th>.*?<tbody>\s*<tr>(.*?)</tr>", text, re.S)
    assert first is not None and re.findall(r"<td>([^<]*)</td>", first[1]) == [
        "scopes in graphs",
        "attn of 24 layers",
        "attn of 20 layers, moe_router of 22 layers",
    ]


def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no record" in capsys.readouterr().err
    write(tmp_path, make_record(steps=3, graphs=False))
    assert main(["report", str(tmp_path), "--", "--lr", "1"]) == 2
    assert "takes no --lr 1" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'megatron-cg[report]'" in capsys.readouterr().err


def test_the_title_names_the_model_and_the_date(undrawn: None) -> None:
    record = make_record(steps=2) | {"began": "2026-11-23T10:00:00+00:00"}
    model: dict[str, Any] = {"num_layers": 24, "hidden_size": 2048, "num_experts": 128}
    record["setup"] = {"model": model}
    title = "MoE model with 128 experts, 24 layers, hidden size 2048, 2026-11-23"
    assert f"<title>{title}</title>" in page(Story("one", {0: record}))
    record["setup"] = {}
    assert "<h1>one, 2026-11-23</h1>" in page(Story("one", {0: record}))
