"""The page as a document: whole, loading nothing, and saying everything without its figures."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.telemetry.record_setup import of_tape
from megatron_cg.tools.cli.main import main
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.pages.figures import Plot
from megatron_cg.tools.pages.theme import DARK, LIGHT, STYLED, Palette, as_styled
from megatron_cg.tools.report.coverage import read_coverage
from megatron_cg.tools.report.report_page import page
from megatron_cg.tools.report.report_plots import of_coverage
from megatron_cg.tools.report.story import Story, read_story
from tests.unit.tools.report.made_up import make_record, write

_VOID = {"meta", "br", "use", "path", "rect", "line"}


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


@pytest.fixture(scope="module")
def document(made_up_page: str) -> Document:
    return Document(made_up_page)


@pytest.fixture
def no_svg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written without their plots, which take most of the time."""
    monkeypatch.setattr("megatron_cg.tools.pages.figures._svg", lambda *_: ("0 0 1 1", ""))


def test_every_element_is_closed_and_every_id_is_one(document: Document) -> None:
    assert document.open == []
    ids = Counter(attributes["id"] for _, attributes in document.attributes if "id" in attributes)
    assert ids and max(ids.values()) == 1


def test_every_reference_leads_to_a_part_of_the_page(made_up_page: str, document: Document) -> None:
    ids = {attributes["id"] for _, attributes in document.attributes if "id" in attributes}
    links = [a[k] for _, a in document.attributes for k in ("href", "xlink:href") if k in a]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)
    clips = set(re.findall(r"url\(#([^)]+)\)", made_up_page))
    assert clips and clips <= ids


def test_nothing_is_loaded_from_anywhere(made_up_page: str, document: Document) -> None:
    names = {name for name, _ in document.attributes}
    assert not names & {"script", "link", "img", "image", "iframe", "object", "embed", "video"}
    assert not {name for _, a in document.attributes for name in a} & {"src", "srcset", "onload"}
    addresses = set(re.findall(r"https?://[^\"' <)]+", made_up_page))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in made_up_page and "default-src 'none'" in made_up_page


def test_every_figure_has_both_widths_a_name_and_a_caption(document: Document) -> None:
    pictures = document.of("svg")
    kinds = Counter(picture["class"] for picture in pictures)
    assert kinds["wide"] == kinds["narrow"] == len(document.of("figure")) == 10
    assert all(p["role"] == "img" and len(p["aria-label"]) > 30 for p in pictures)
    assert len(document.of("figcaption")) == 10


def test_colours_of_figures_are_the_pages(made_up_page: str) -> None:
    assert not re.search(r"#00fe[0-9a-f]{2}", made_up_page)
    pictures = "".join(re.findall(r"<svg.*?</svg>", made_up_page, re.S))
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", pictures))
    hatches = {colour for colour in colours if colour.startswith("url(#")}
    assert hatches and len(colours - hatches) > 5
    assert colours - hatches <= {"none", *(f"var(--{name})" for name in vars(STYLED))}


def test_text_of_a_run_cannot_become_markup(made_up_page: str) -> None:
    assert "argument &lt;hidden&gt; &amp; co" in made_up_page and "<hidden>" not in made_up_page
    record = make_record(steps=2)
    record["error"] = record["command"][0] = '</p><script>alert("x")</script>'
    for step in record["steps"]:
        step["losses"] = {'<b onload="x">$^': step["losses"]["lm loss"]}
    odd = page(Story("<title>", {0: record}, name="__<i>" + "long" * 20))
    document = Document(odd)
    assert document.open == [] and "script" not in {name for name, _ in document.attributes}


def test_the_same_record_makes_the_same_figure() -> None:
    def draw() -> object:
        found = read_coverage(Story("one", {0: make_record(steps=6)}))
        assert found is not None
        return Plot("map", of_coverage(found)).svgs()

    assert draw() == draw()


def test_a_record_without_what_newer_ones_have_is_told_of() -> None:
    record = make_record(steps=2, graphs=False)
    record["graphs"] = {"captured": 1, "replayed": 1}
    for key in ("machine", "command", "environment", "captures", "intervals", "events"):
        del record[key]
    text = page(Story("old", {0: record}))
    assert "was not recorded" in text and "not recorded</code>" in text


def test_what_is_changed_in_other_packages_is_listed_where_it_was_recorded(no_svg: None) -> None:
    record = make_record(steps=6)
    text = page(Story("one", {0: record}))
    assert "Changes in other packages" in text and "Layer.forward" in text
    del record["captures"][0]["patches"]
    assert "Changes in other packages" not in page(Story("one", {0: record}))


def test_a_run_without_a_step_has_a_page() -> None:
    record = make_record(steps=0, graphs=False)
    record["finished"] = False
    assert "No step has ended" in page(Story("none", {0: record}))


def test_two_real_runs_make_a_page(tape_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tape_pair), "--png"]) == 0
    text = (tape_pair / "report.html").read_text(encoding="utf-8")
    assert "Identical, to the last bit" in text
    assert "3 of 3 layers have a graph" in text and "attn, mlp" in text
    assert "times mean nothing for a GPU" in text
    assert "None: no guard forbade a replay" in text
    names = {path.name for path in tape_pair.glob("*.png")}
    assert {"loss-1.png", "step-times.png", "coverage.png", "counters.png"} <= names
    assert capsys.readouterr().out.count("written: ") == 1 + len(names)
    for path in tape_pair.glob("*.png"):
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20]) > 1000


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


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_text_is_4_5_to_1_and_curves_are_3_to_1(palette: Palette) -> None:
    for text in (palette.ink, palette.muted, palette.good, palette.bad):
        assert min(contrast(text, palette.page), contrast(text, palette.panel)) >= 4.5
    assert contrast(palette.run, palette.page) >= 4.5  # links
    for curve in (palette.reference, palette.third, palette.fourth):
        assert contrast(curve, palette.page) >= 3


def test_a_stand_in_is_replaced_by_its_name() -> None:
    assert as_styled(f'style="fill: {STYLED.run}"') == 'style="fill: var(--run)"'


def test_a_key_of_matplotlib_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_cg.tools.pages import figures

    settings: dict[str, Any] = figures._style(LIGHT)
    import matplotlib as mpl

    assert set(settings) <= set(mpl.rcParams)


def test_the_title_names_the_model_and_the_date(tape_pair: Path, no_svg: None) -> None:
    record = make_record(steps=2) | {"began": "2026-11-23T10:00:00+00:00"}
    model: dict[str, Any] = {"num_layers": 24, "hidden_size": 2048, "num_experts": 128}
    record["setup"] = {"model": model}
    title = "MoE model with 128 experts, 24 layers, hidden size 2048, 2026-11-23"
    assert f"<title>{title}</title>" in page(Story("one", {0: record}))
    model["num_experts"] = None
    assert "<h1>Dense model, 24 layers" in page(Story("one", {0: record}))
    model["hybrid_layer_pattern"] = "M*M*"
    assert "<h1>Hybrid model, 24 layers" in page(Story("one", {0: record}))
    record["setup"] = {}
    assert "<h1>one, 2026-11-23</h1>" in page(Story("one", {0: record}))
    record["setup"] = of_tape(TrainingPlan(CpuModelConfig(layers=3, hidden_size=32)))
    assert "<h1>Dense model, 3 layers, hidden size 32, 2026-11-23</h1>" in page(
        Story("one", {0: record})
    )
    assert re.search(r"<h1>tape, 20\d\d-\d\d-\d\d</h1>", page(read_story(tape_pair)))


def test_unequal_numbers_and_shards_are_a_table(no_svg: None) -> None:
    eager, graphs = make_record(graphs=False, steps=20), make_record(steps=20, off=17)
    graphs["parameters"] = {"main:w": "b", "<s>": "a"}
    text = page(Story("pair", {0: graphs}, reference={0: eager}))
    (section,) = re.findall(r'<section id="different">.*?</section>', text, re.S)
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert cells[0] == ["step", "rank", "quantity", "eager", "graphs", "difference"]
    assert [row[:3] for row in cells[1:5]] == [[f"{n}", "0", "lm loss"] for n in range(17, 21)]
    one, two = (record["steps"][16]["losses"]["lm loss"]["hex"] for record in (eager, graphs))
    assert [float(cell) for cell in cells[1][3:5]] == [float.fromhex(one), float.fromhex(two)]
    assert cells[5:] == [["parameter shard"], ["rank 0 main:w"], ["rank 0 &lt;s&gt;"]]
    assert "4 of 60 numbers" in section and "of which" not in section


def test_of_many_unequal_numbers_the_first_are_shown(made_up_page: str) -> None:
    (section,) = re.findall(r'<section id="different">.*?</section>', made_up_page, re.S)
    assert section.count("<tr>") == 21 and "of which these are the first 20" in section


def test_numbers_that_a_failed_run_lacks_are_no_rows() -> None:
    graphs = make_record(steps=3)
    graphs["finished"], graphs["error"] = False, "RuntimeError: on purpose"
    text = page(Story("pair", {0: graphs}, reference={0: make_record(graphs=False)}))
    assert 'id="different"' not in text and "RuntimeError: on purpose" in text


def test_sections_with_nothing_in_them_are_left_out(made_up_page: str, no_svg: None) -> None:
    every = ["different", "losses", "times", "graphed", "memory", "counters", "faults", "patches"]
    assert re.findall(r'<section id="(\w+)"', made_up_page) == [*every, "versions"]
    assert re.findall(r'<li><a href="#(\w+)"', made_up_page) == [*every, "versions"]
    record = make_record(graphs=False) | {"device": "cpu", "intervals": []}
    text = page(Story("one", {0: record}))
    assert re.findall(r'<section id="(\w+)"', text) == ["losses", "times", "faults", "versions"]
