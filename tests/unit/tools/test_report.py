"""What ``report`` prints: runs that agree, differ, failed or still train, and damaged records."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.compare import graph_counts
from megatron_cg.tools.report import (
    compared,
    counted_steps,
    faults,
    lines,
    median_step,
    outcome,
    read_runs,
)
from tests.unit.tools.conftest import Cli
from tests.unit.tools.records import MISMATCH, make_record, write

EAGER = make_record(graphs=False)
FAILED = {"finished": False, "error": "RuntimeError: out of luck"}


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Two runs of two ranks, as align leaves them; their losses come to differ."""
    write(tmp_path / "eager" / "record", *[make_record(graphs=False)] * 2)
    write(tmp_path / "graphs" / "record", *[make_record(off=17)] * 2)
    return tmp_path


@pytest.mark.parametrize(("graphs", "counted"), [(True, range(7, 41)), (False, range(21, 41))])
def test_steps_whose_time_counts_come_after_capture(graphs: bool, counted: range) -> None:
    assert counted_steps(make_record(graphs=graphs)) == counted


def test_folders_of_align_of_one_run_and_of_two_are_found(made_up: Path) -> None:
    graphs, eager = read_runs(made_up)
    assert eager is not None and set(graphs) == {0, 1} and not graph_counts(eager)
    assert read_runs(made_up / "graphs" / "record") == (graphs, None)
    assert read_runs(made_up / "graphs", made_up / "eager") == (graphs, eager)


@pytest.mark.parametrize(
    ("record", "reference", "said"),
    [
        (make_record(), EAGER, "to the last bit: all 120 losses and gradient norms and 2 param"),
        (make_record(off=17), EAGER, "Different from the other run: 24 of 120 losses"),
        (
            make_record() | {"parameters": {}},
            EAGER | {"parameters": {}},
            "Not shown to be equal to the other run: the eager run, rank 0: no parameter shard",
        ),
        (EAGER, EAGER, "Not shown to be equal to the other run: the graph run captured no graph"),
        (make_record() | FAILED, EAGER, "Not shown to be equal"),
        (make_record() | {"device": "another"}, EAGER, "Not comparable with the other run"),
    ],
)
def test_a_comparison_claims_no_more_than_was_compared(
    record: dict[str, Any], reference: dict[str, Any], said: str
) -> None:
    found = compared({0: record}, {0: reference})
    assert said in found and ("Identical" in found) == ("to the last bit" in said)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (EAGER, "Trained to its end. 40 steps are recorded."),
        (EAGER | {"finished": False}, "Not ended. 40 steps"),
        (EAGER | FAILED, "The run failed. 40 steps are recorded."),
        (EAGER | {"world_size": 2**52}, "none of 1, 2, 3, 4, 5, 6"),
    ],
)
def test_it_says_how_the_run_ended(record: dict[str, Any], said: str) -> None:
    assert said in outcome({0: record})


def test_times_of_a_cpu_are_named_as_such() -> None:
    assert median_step(make_record()) == "Median step: 102.0 ms (steps 7 to 40, rank 0)."
    assert "times mean nothing" in median_step(make_record() | {"device": "cpu"})


def test_a_fault_is_told_once_with_its_ranks() -> None:
    run = {0: make_record(), 1: make_record()}
    assert faults(run) == [f"- ranks 0, 1: after step 19, warning: {MISMATCH}"]
    assert graph_counts(run)["mismatched"] == 2
    run[1]["captures"].append({"after_step": 30, "error": "CaptureError: no room"})
    assert "- rank 1: after step 30, capture failed: CaptureError: no room" in faults(run)


def test_all_that_a_record_can_hold_is_printed_or_written(made_up: Path, cli: Cli) -> None:
    code, text, said = cli("report", made_up)
    assert (code, said) == (0, "")
    for part in (
        *("2 ranks on a made-up GPU", "Different from the other run", "- ranks 0, 1: after step"),
        *("| step | lm loss ", "| 40   | ", "of the rank that had most: 26900"),
        *("24 graphs of 24 layers in 2.47 s", "2 not allowed by a guard", "torch 0.0\n"),
        *("NCCL_GRAPH_REGISTER 0\n", "command: train.py --seed 1 --cuda-graph-modules attn\n"),
    ):
        assert part in text, part
    written = made_up / "text"
    assert cli("report --out", written, made_up) == (0, f"written: {written}\n", "")
    assert written.read_text() == text


def test_a_table_of_a_long_run_has_few_steps_and_its_evaluations() -> None:
    record = make_record(steps=500)
    record["steps"][332]["losses"]["evaluation lm loss"] = 1.0
    rows = [line for line in "\n".join(lines({0: record})).splitlines() if line.startswith("| ")]
    shown = [row.split()[1] for row in rows[2:]]
    assert len(shown) < 30 and "333" in shown and shown[-1] == "500"


def test_a_run_without_a_step_is_told() -> None:
    text = "\n".join(lines({0: make_record(steps=0, graphs=False) | {"finished": False}}))
    assert "No step has ended" in text and "Median step" not in text


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


def test_a_damaged_record_is_printed_or_one_message(tmp_path: Path, cli: Cli) -> None:
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
