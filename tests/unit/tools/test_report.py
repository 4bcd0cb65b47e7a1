"""What ``report`` prints: runs that agree, differ, failed or still train."""

from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.compare import graph_counts
from megatron_cg.tools.report import (
    compared,
    faults,
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


def test_folders_of_align_of_one_run_and_of_two_are_found(made_up: Path) -> None:
    graphs, eager = read_runs(made_up)
    assert eager is not None and set(graphs) == {0, 1} and not graph_counts(eager)
    assert read_runs(made_up / "graphs" / "record") == (graphs, None)
    assert read_runs(made_up / "graphs", made_up / "eager") == (graphs, eager)


@pytest.mark.parametrize(
    ("record", "reference", "said"),
    [
        (make_record(), EAGER, "IDENTICAL, to the last bit. Compared with the other run: 120"),
        (make_record(off=17), EAGER, "DIFFERENT: first difference at step 17, rank 0, lm loss"),
        (
            make_record() | {"parameters": {}},
            EAGER | {"parameters": {}},
            "FAILED: the eager run, rank 0: no parameter shard",
        ),
        (EAGER, EAGER, "FAILED: the graph run captured no graph"),
        (make_record() | FAILED, EAGER, "FAILED"),
        (make_record() | {"device": "another"}, EAGER, "NOT COMPARABLE"),
    ],
)
def test_a_comparison_claims_no_more_than_was_compared(
    record: dict[str, Any], reference: dict[str, Any], said: str
) -> None:
    found = compared({0: record}, {0: reference})
    assert said in found and ("IDENTICAL" in found) == ("to the last bit" in said)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (EAGER, "Trained to its end. 40 steps are recorded."),
        (EAGER | {"finished": False}, "Not ended. 40 steps"),
        (EAGER | FAILED, "The run failed. 40 steps are recorded."),
        (EAGER | {"world_size": 9}, "none of 1, 2, 3, 4, 5, 6"),
    ],
)
def test_it_says_how_the_run_ended(record: dict[str, Any], said: str) -> None:
    assert said in outcome({0: record})


def test_a_fault_is_told_once_with_its_ranks() -> None:
    run = {0: make_record(), 1: make_record()}
    assert faults(run) == [f"- ranks 0, 1: after step 19, warning: {MISMATCH}"]
    assert graph_counts(run)["mismatched"] == 2
    run[1]["captures"].append({"after_step": 30, "error": "CaptureError: no room"})
    assert "- rank 1: after step 30, capture failed: CaptureError: no room" in faults(run)


def test_what_a_record_holds_is_printed(made_up: Path, cli: Cli) -> None:
    code, text, said = cli("report", made_up)
    assert (code, said) == (0, "")
    for part in (
        *("2 ranks on a made-up GPU", "DIFFERENT: first", "- ranks 0, 1: after step"),
        *("of the rank that had most: 26900", "2 mismatched"),
    ):
        assert part in text, part
