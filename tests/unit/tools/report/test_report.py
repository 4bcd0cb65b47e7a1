"""From records to points, sentences and the page: runs that agree, differ, failed or go on."""

import base64
import json
import math
import random
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.telemetry import recording
from megatron_cg.tools.align.compare import graph_counts
from megatron_cg.tools.record.record import Recorder
from megatron_cg.tools.report import report_page
from megatron_cg.tools.report.report_page import (
    Story,
    counted_steps,
    faults,
    page,
    peaks,
    read_story,
    speed,
    verdict,
)
from tests.unit.tools.conftest import Cli
from tests.unit.tools.records import MISMATCH, make_record, write

EAGER = make_record(graphs=False)
FAILED = {"finished": False, "error": "RuntimeError: out of luck"}
MODEL = CpuModelConfig(layers=3, graph_modules=("attn", "mlp"), sequence_length=16)


def pair(graphs: dict[str, Any], eager: dict[str, Any] = EAGER) -> Story:
    return Story("pair", {"eager": {0: eager}, "graphs": {0: graphs}})


def one(record: dict[str, Any]) -> Story:
    return Story("one", {"graphs": {0: record}})


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A pair of two ranks with everything that a record can hold; its losses come to differ."""
    write(tmp_path / "made-up" / "eager" / "record", *[make_record(graphs=False)] * 2)
    write(tmp_path / "made-up" / "graphs" / "record", *[make_record(off=17)] * 2)
    return tmp_path / "made-up"


@pytest.fixture
def tape_pair(one_rank: None, tmp_path: Path) -> Path:
    """A pair of real runs, in a folder as ``megatron-cg align --work-dir`` leaves it."""
    from megatron.core import parallel_state

    from megatron_cg.tape.train import Trainer
    from megatron_cg.tools.align.tape_run import record_steps

    for name in ("eager", "graphs"):
        torch.manual_seed(7)
        plan = TrainingPlan(MODEL, steps=8, warmup_steps=3, graphs=name == "graphs")
        recorder = Recorder(tmp_path / "tape" / name / "record")
        with recording(recorder), closing(Trainer(plan)) as trainer:
            record_steps(plan, trainer, recorder)
            recorder.finish([trainer.model])
        parallel_state.destroy_model_parallel()
    return tmp_path / "tape"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and not written as files, which takes most of the time."""
    monkeypatch.setattr(report_page, "png", lambda _figure: b"")


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", text)


@pytest.mark.parametrize(("graphs", "counted"), [(True, range(7, 41)), (False, range(21, 41))])
def test_steps_whose_time_counts_come_after_capture(graphs: bool, counted: range) -> None:
    assert counted_steps(one(make_record(graphs=graphs))) == counted


def test_folders_of_align_of_one_run_and_of_two_are_found(made_up: Path, tmp_path: Path) -> None:
    both = read_story(made_up)
    assert list(both.runs) == ["eager", "graphs"] and set(both.run) == {0, 1}
    assert read_story(made_up / "graphs" / "record").name == "graphs"
    against = read_story(made_up / "graphs", made_up / "eager")
    assert against.title == "graphs against eager" and against.runs == both.runs
    # Of two folders with one name.
    write(tmp_path / "graphs", make_record(steps=3))
    assert list(read_story(tmp_path / "graphs", made_up / "graphs").runs) == [
        str(made_up / "graphs"),
        str(tmp_path / "graphs"),
    ]


@pytest.mark.parametrize(
    ("story", "kind", "said"),
    [
        (pair(make_record()), "good", "120 losses and gradient norms and 2 parameter shards have"),
        (pair(make_record(off=17)), "bad", "step 17"),
        (
            pair(make_record() | {"parameters": {}}, EAGER | {"parameters": {}}),
            "note",
            "no parameter shard was recorded",
        ),
        (pair(EAGER), "note", "captured no graph"),
        (pair(make_record() | FAILED), "note", "RuntimeError: out of luck"),
        (one(EAGER), "note", "There is no run to compare it with"),
        (one(EAGER | {"finished": False}), "note", "still going, or was killed"),
        (one(EAGER | FAILED), "bad", "40 steps are recorded"),
    ],
)
def test_the_verdict_claims_no_more_than_was_compared(story: Story, kind: str, said: str) -> None:
    found = verdict(story)
    assert found.kind == kind and said in found.text
    assert (found.head == "Identical, to the last bit") == (kind == "good")


def test_times_and_memory_are_ratios_and_times_need_a_gpu() -> None:
    more = make_record()
    more["peak_allocated_bytes"] += 2**30
    story = Story(
        "pair", {"eager": dict.fromkeys((0, 1), EAGER), "graphs": {0: make_record(), 1: more}}
    )
    assert "eager 152.0 ms, graphs 102.0 ms, a ratio of 0.671 (steps 7 to 40" in speed(story)
    assert "eager 26000 MiB, graphs 27924 MiB, a ratio of 1.074" in peaks(story)
    on_cpu = pair(make_record() | {"device": "cpu"}, EAGER | {"device": "cpu"})
    assert "times mean nothing for a GPU" in speed(on_cpu)


def test_a_fault_is_told_once_with_its_ranks() -> None:
    story = Story("one", {"graphs": {0: make_record(), 1: make_record()}})
    assert faults(story) == [f"graphs, ranks 0, 1: after step 19, warning: {MISMATCH}"]
    assert graph_counts(story.run)["mismatched"] == 2
    story.run[1]["captures"].append({"after_step": 30, "error": "CaptureError: no room"})
    assert "graphs, rank 1: after step 30, capture failed: CaptureError: no room" in faults(story)


def test_the_page_of_two_real_runs(tape_pair: Path, cli: Cli) -> None:
    assert cli("report", tape_pair) == (0, f"written: {tape_pair}/report.html\n", "")
    text = (tape_pair / "report.html").read_text()
    assert "Identical, to the last bit" in text
    assert re.search(r"<h1>tape, 20\d\d-\d\d-\d\d</h1>", text)
    names = ["Losses and gradient norm", "Step times", "What was captured"]
    assert headings(text) == [*names, "Versions, machine and flags"]
    images = re.findall(r'src="data:image/png;base64,([^"]*)" alt="([^"]{20,})"', text)
    assert len(images) == 3
    assert all(base64.b64decode(image).startswith(b"\x89PNG\r\n\x1a\n") for image, _ in images)


def test_a_page_of_all_that_a_record_can_hold_loads_nothing(made_up: Path, undrawn: None) -> None:
    text = page(read_story(made_up))
    assert headings(text) == [
        *("Mismatches and faults", "Losses and gradient norm", "Step times"),
        *("GPU memory", "What was captured", "Versions, machine and flags"),
    ]
    assert not re.findall(r"https?:|@import|<script|<link|<iframe", text)
    assert "default-src 'none'" in text
    assert "24 graphs of 24 layers in 2.47 s" in text and "2 not allowed by a guard" in text


def test_text_of_a_run_cannot_become_markup(undrawn: None) -> None:
    record = make_record(steps=2)
    record["events"].append({"after_step": 1, "level": "warning", "text": MISMATCH})
    record["error"] = record["command"][0] = '</p><script>alert("x")</script>'
    for step in record["steps"]:
        step["losses"] = {'<b onload="x">$^': step["losses"]["lm loss"]}
    odd = page(Story("<title>", {"__<i>" + "long" * 20: {0: record}}))
    assert not re.findall(r"<(?:script|b|i)\b", odd)
    assert "argument &lt;hidden&gt; &amp; co" in odd and "<h1>&lt;title&gt;</h1>" in odd


def test_a_run_without_a_step_has_a_page(undrawn: None) -> None:
    text = page(one(make_record(steps=0, graphs=False) | {"finished": False}))
    assert "No step has ended" in text
    assert headings(text) == ["Losses and gradient norm", "Versions, machine and flags"]


ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 2**62, 10**400, 1e308, -1e308, math.nan, math.inf),
    *("", "abc", "\ud800", "\x00\n", [], {}, [[]], [None], {"a": {}}),
]


def mutated(draw: random.Random, text: bytes) -> bytes:
    """The record cut short, with other bytes, too deep, or with other values, keys or none."""
    at, kind = draw.randrange(len(text)), draw.randrange(6)
    if kind < 3:
        return (
            text[:at]
            + (b"", bytes(draw.choices(range(256), k=3)), b"[" * 10**5)[kind]
            + (text[at + 3 :] if kind else b"")
        )
    lines = [json.loads(line) for line in text.splitlines()]
    value: Any = lines
    while True:
        key = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
        if not (isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8):
            break
        value = value[key]
    if kind == 3 or not isinstance(value, dict):
        value[key] = draw.choice(ODD)
    elif kind == 4:
        del value[key]
    else:
        value[draw.choice(["x", "\ud800", "lm loss", "$a_"])] = value.pop(key)
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"


def test_a_damaged_record_has_a_page_or_one_message(
    tmp_path: Path, undrawn: None, cli: Cli
) -> None:
    draw, ends = random.Random(54), dict[object, int]({0: 0, 2: 0})
    made = make_record(steps=4, off=3) | {"began": "2026-01-01"}
    later = ("steps", "captures", "events", "graphs", "finished", "error")
    entries = [{key: made[key] for key in made if key not in later}]
    entries += [{key: made[key]} for key in later]
    text = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    write(tmp_path / "eager" / "record", make_record(steps=4, graphs=False))
    (record := tmp_path / "graphs" / "record").mkdir(parents=True)
    for _ in range(120):
        (record / "rank0.jsonl").write_bytes(mutated(draw, text))
        code, _, said = cli("report", tmp_path)
        ends[code] += 1
        assert said.count("\n") == (code == 2), said
        told = r"/rank0.jsonl is not a record .*: line \d+: |holds a record with values that no run"
        assert code == 0 or re.search(told, said), said
    assert min(ends.values()) > 20


def test_a_record_is_not_believed_about_the_number_of_ranks(tmp_path: Path) -> None:
    write(tmp_path, make_record(steps=2))
    path = tmp_path / "rank0.jsonl"
    path.write_text(path.read_text().replace('"world_size": 1', f'"world_size": {2**52}'))
    assert "none of 1, 2, 3, 4, 5, 6" in verdict(read_story(tmp_path)).text


def test_without_matplotlib_it_is_said_what_to_install(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, make_record(steps=3, graphs=False))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    ended = cli("report", tmp_path)
    assert ended.code == 2 and "in a checkout pip install '.[report]'" in ended.err
