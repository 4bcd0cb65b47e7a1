"""The table of features leaves out no refusal, and everything that a row points to exists."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_cg.errors import UpstreamChangedError
from tests.unit.arguments.rule_cases import ALL
from tests.unit.test_fault_table import matches
from tools.generated import refused
from tools.refusals.registry import MISTAKES, OWN_LOOP, ROWS
from tools.refusals.row import CORE, Line, Row, Status

ROOT = Path(__file__).parents[2]
CODE = (ROOT / "arguments", ROOT / "megatron_cg")
MAKES = {"Violation", "Refusal", "_WithGemm", "_InGraph"}
"""What takes a refusal's name first."""
SHOWN = [row for row in ROWS if row.tests]
ASKED_OF_RULES = "unit/arguments/test_rules.py::"
"""Its tests show that a rule refuses, and not that what it says is so."""


def names_in(path: Path) -> Iterator[str]:
    """The names of the refusals in a file: written in place, or as its constant ``_RULE``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value: ast.expr | None = None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKES and node.args:
            value = node.args[0]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_RULE":
            value = node.value
        if isinstance(value, ast.Constant):
            yield str(value.value)


def test_every_refusal_is_in_one_place_and_every_name_is_one() -> None:
    files = {path.resolve() for folder in CODE for path in folder.rglob("*.py")}
    used = {name for path in files for name in names_in(path)} | {case.rule for case in ALL}
    placed = Counter(name for row in ROWS for name in row.rules)
    placed.update([*OWN_LOOP, *MISTAKES])
    assert set(placed) == used
    assert set(placed.values()) == {1}


def test_a_plan_names_every_refusal_of_a_feature() -> None:
    """It checks the rules that have cases; one is read first, a run alone sees three."""
    named = {name for row in ROWS for name in row.rules}
    others = {
        "yaml-config",
        "rows-outside-schedule",
        "rows-second-call",
        "pack-sequences-mrope",
        "full-recompute-lost-gradients",
    }
    assert named - {case.rule for case in ALL} == others


def test_what_a_message_cannot_say_is_no_mistake() -> None:
    """A mistake is mended by what its message says to type; every rule of ours has such a case."""
    ours = {case.rule for case in ALL}
    assert all(case.remedy for case in ALL if case.rule in MISTAKES & ours)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.feature[:40])
def test_a_row_shows_what_it_says(row: Row) -> None:
    assert row.why
    if row.status is Status.SUPPORTED:
        assert row.tests and not row.rules
    else:
        assert row.rules and (row.tests or row.lines)
    if row.status is Status.UPSTREAM:
        assert row.lines
    for line in row.lines:
        assert line.number() > 0


REFUSED = [row for row in ROWS if row.rules]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.feature[:40])
def test_no_refusal_is_without_a_reproduction(row: Row) -> None:
    assert any(not name.startswith(ASKED_OF_RULES) for name in row.tests)


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The ids of all tests in the files that rows name."""
    files = sorted({f"tests/{name.partition('::')[0]}" for row in ROWS for name in row.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    # A third of the time that Megatron's import takes is that of torch's compiler.
    quick = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=quick, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.feature[:40])
def test_every_test_that_a_row_names_exists(row: Row, collected: set[str]) -> None:
    for name in row.tests:
        assert matches(f"tests/{name}", collected), name


@pytest.mark.parametrize("text", ["no such text", "import"], ids=["absent", "on several lines"])
def test_a_line_that_moved_away_is_an_error_with_its_package(text: str) -> None:
    line = Line(CORE, "megatron/core/transformer/transformer_config.py", text)
    with pytest.raises(UpstreamChangedError, match=r"megatron-core .*transformer_config\.py"):
        line.number()


def test_a_file_that_is_gone_is_an_error_with_its_package() -> None:
    with pytest.raises(UpstreamChangedError, match=r"megatron-core .*megatron/gone\.py"):
        Line(CORE, "megatron/gone.py", "x").number()


def test_the_table_has_a_row_for_each_feature() -> None:
    lines = refused.features().splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert all(line.count(" | ") == len(lines[0].split(" | ")) - 1 for line in lines[2:])
