"""The fault table of docs/faults.md names tests that exist, and leaves out no fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.functional import life_cases, test_failures
from tests.functional.tampered import ACTIONS
from tests.functional.tampering import replay
from tests.unit.replay.guard.test_faults import FAULTS
from tests.unit.runs import test_life, test_one_rank_failures

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults.md"
COLUMNS = (
    *("fault", "injected by", "when", "rank", "detected by", "what follows"),
    *("on the tape", "on two GPUs"),
)
TAPE, GPUS = "tests/unit", "tests/functional"
CODE = re.compile(r"`([^`]+)`")
REASON = re.compile(r"— \w.{7,}")
SUITES = ("test_failures.py", "test_faults.py", "test_life.py", "test_long.py")
"""All of their tests inject a fault or are a run's life."""


@dataclass(frozen=True)
class Row:
    line: int
    cells: dict[str, str]

    def words(self, column: str) -> set[str]:
        """What the cell says as code."""
        return set(CODE.findall(self.cells[column]))

    def tests(self, column: str) -> list[str]:
        folder = {"on the tape": TAPE, "on two GPUs": GPUS}[column]
        found = CODE.findall(self.cells[column])
        return [] if self.is_dash(column) else [f"{folder}/{name}" for name in found]

    def is_dash(self, column: str) -> bool:
        return self.cells[column].startswith("—")

    def __str__(self) -> str:
        return f"{TABLE.name}:{self.line} ({self.cells['fault']})"


def read_rows(text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or line.startswith("|-") or cells[0] == COLUMNS[0]:
            continue
        assert len(cells) == len(COLUMNS), f"line {number}: {len(cells)} cells"
        rows.append(Row(number, dict(zip(COLUMNS, cells, strict=True))))
    return rows


ROWS = read_rows(TABLE.read_text(encoding="utf-8"))


def words(column: str) -> set[str]:
    return set().union(*(row.words(column) for row in ROWS))


def named_tests(column: str) -> set[str]:
    return {name for row in ROWS for name in row.tests(column)}


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The ids of all tests in the files that the table names."""
    names = named_tests("on the tape") | named_tests("on two GPUs")
    files = sorted({name.partition("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # A third of the time that Megatron's import takes is that of torch's compiler.
    quick = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=quick, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def matches(name: str, collected: set[str]) -> set[str]:
    """``file::test`` is all of its cases, and ``[begin…]`` those whose id begins so."""
    if name.endswith("…]"):
        return {test for test in collected if test.startswith(name.removesuffix("…]"))}
    return {test for test in collected if test == name or test.startswith(name + "[")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.line))
def test_every_test_named_exists(row: Row, collected: set[str]) -> None:
    for column in ("on the tape", "on two GPUs"):
        for name in row.tests(column):
            assert matches(name, collected), f"{row}: there is no {name}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.line))
def test_a_row_has_a_test_or_a_reason(row: Row) -> None:
    assert all(row.cells.values()), str(row)
    columns = ("on the tape", "on two GPUs")
    for column in columns:
        assert row.tests(column) or REASON.fullmatch(row.cells[column]), str(row)
    assert any(row.tests(column) for column in columns), f"{row} has no test"


def test_the_tables_have_one_header() -> None:
    header = f"| {' | '.join(COLUMNS)} |"
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if "| fault" in line]
    assert len(lines) > 1 and set(lines) == {header}


def test_every_clause_of_the_guard_has_a_row() -> None:
    clauses = set().union(
        *(re.findall(r"clause `([^`]+)`", row.cells["detected by"]) for row in ROWS)
    )
    assert set(FAULTS) <= clauses
    for clause in FAULTS:
        test = f"test_each_fault_is_seen_and_training_stays_bit_equal[{clause}]"
        assert f"{TAPE}/replay/guard/test_faults.py::{test}" in named_tests("on the tape"), clause


def test_every_capture_that_fails_on_one_rank_has_a_row() -> None:
    stages = set().union(*(re.findall(r"stage `([^`]+)`", r.cells["injected by"]) for r in ROWS))
    assert stages == set(test_one_rank_failures.STAGES)
    test = "runs/test_one_rank_failures.py::test_all_ranks_go_on_eagerly_with_the_same_numbers"
    cases_named = {f"{TAPE}/{test}[{case}]" for case in test_one_rank_failures.CASES}
    assert cases_named <= named_tests("on the tape")


def test_every_life_has_a_row() -> None:
    test = f"{TAPE}/runs/test_life.py::test_a_life_with_graphs_is_the_eager_one"
    assert {f"{test}[{name}]" for name in test_life.LIVES} <= named_tests("on the tape")


def test_every_action_on_gpus_has_a_row() -> None:
    injected = words("injected by")
    actions = {word.partition("@")[0] for word in injected if word.partition("@")[0] in ACTIONS}
    assert actions == set(ACTIONS)
    stages = {f"fail@{stage}" for stage in test_failures.STAGES}
    faults = {f"fault@{name}" for name in replay.FAULTS}
    assert stages | faults <= {"@".join(word.split("@")[:2]) for word in injected}
    cases = life_cases.LIFE.values()
    scenarios = {value for case in cases for _, value in case.env if "@" in value}
    assert {scenario.partition("@")[0] for scenario in scenarios} <= actions


def test_every_test_of_a_fault_on_gpus_is_in_the_table(collected: set[str]) -> None:
    named = set().union(*(matches(name, collected) for name in named_tests("on two GPUs")))
    wanted = {test for test in collected if test.startswith(tuple(f"{GPUS}/{s}" for s in SUITES))}
    assert wanted and wanted - named == set()
