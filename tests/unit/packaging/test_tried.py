"""What was run with which versions, what the package admits, and what it says: one list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron_cg.arguments.rules_environment import _SEEN, _SEEN_ON_TAPE, unseen_versions
from megatron_cg.arguments.schema import Environment
from tests.unit.packaging.test_metadata import bounds, pinned
from tools import try_versions
from tools.generated.tried import tried
from tools.try_versions import CHECKS, PACKAGES, TRIED, Combination

ROWS: list[dict[str, str]] = json.loads(TRIED.read_text(encoding="utf-8"))
GOOD = [row for row in ROWS if try_versions.succeeded(row)]
MEASURED = {name: ".".join(map(str, _SEEN[name])) for name in PACKAGES}


def beside_the_measured(name: str) -> set[str]:
    """Versions of a package that passed with the measured ones of all others."""
    others = [other for other in PACKAGES if other != name]
    rows = [row for row in GOOD if all(row[other] == MEASURED[other] for other in others)]
    return {row[name] for row in rows}


def test_every_combination_of_the_tool_has_its_row() -> None:
    wanted = [combination.versions for combination in try_versions.COMBINATIONS]
    assert [{name: row[name] for name in PACKAGES} for row in ROWS] == wanted


@pytest.mark.parametrize("name", PACKAGES)
def test_the_bounds_admit_the_measured_and_newer_ones_that_ran_and_nothing_above(name: str) -> None:
    """Older ones may be outside: they were not run on GPUs."""
    ran = {Version(v) for v in beside_the_measured(name) if v != try_versions.MAIN}
    releases = {version for version in ran if version >= Version(MEASURED[name])}
    assert Version(MEASURED[name]) in releases
    assert all(bounds(name).specifier.contains(version) for version in releases)
    newest = max(releases)
    assert not bounds(name).specifier.contains(f"{newest.major}.{newest.minor + 1}.0")


def test_what_is_said_to_have_run_on_the_tape_has() -> None:
    passed = {Version(version).release[:2] for version in beside_the_measured("torch")}
    assert passed == {*_SEEN_ON_TAPE["torch"], _SEEN["torch"][:2]}


def test_the_second_environment_has_the_newest_torch_that_passed() -> None:
    (item,) = pinned("newest.txt")
    assert str(item.specifier) == f"=={max(beside_the_measured('torch'), key=Version)}"


@pytest.mark.parametrize(
    ("version", "backend", "said"),
    [
        ("2.11.0", "tape", None),
        ("2.14.1+cpu", "tape", None),
        ("2.14.1", "transformer_engine", "on the CPU tape alone, 2.11.0 on GPUs"),
        ("2.99.0", "tape", "was never run with this package, 2.11.0 was"),
        ("odd", "tape", "was never run"),
    ],
)
def test_a_version_that_ran_on_the_tape_alone_is_told_on_gpus(
    version: str, backend: str, said: str | None
) -> None:
    found = list(unseen_versions(Environment(versions={"torch": version}, backend=backend)))
    assert len(found) == (said is not None)
    assert all(said is not None and said in line and version in line for line in found)


def test_the_table_has_each_row_and_the_reason_where_one_does_not_install() -> None:
    lines = tried().splitlines()[2:]
    assert len(lines) == len(ROWS)
    for row, line in zip(ROWS, lines, strict=True):
        assert all(row[name] in line for name in PACKAGES)
        assert row["installs"] == "ok" or " ".join(row["installs"].split()) in line


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Looking\nERROR: No matching distribution\nhint", "ERROR: No matching distribution"),
        ("error: no build\n  fatal: unable to access\nhint", "fatal: unable to access"),
        ("one\ntwo", "one"),
        ("", "no reason was given"),
    ],
)
def test_the_reason_is_the_line_that_names_it(said: str, reason: str) -> None:
    assert try_versions.reason(said) == reason


@pytest.mark.parametrize(
    ("code", "last", "said"),
    [
        (0, "189 passed in 134.20s (0:02:14)", "ok: passed"),
        (0, "IDENTICAL, to the last bit (CPU tape: a recording)", "ok: IDENTICAL, to the last bit"),
        (1, "1 failed, 188 passed in 9.1s", "failed with exit code 1: 1 failed, 188 passed"),
    ],
)
def test_an_end_is_told_without_times(code: int, last: str, said: str) -> None:
    assert try_versions.ended(code, last) == said


def test_a_row_replaces_the_one_of_its_versions(tmp_path: Path) -> None:
    file = tmp_path / "tried.json"
    for installs in ("does not install: no", "ok"):
        try_versions.keep({**Combination(torch="2.13.0").versions, "installs": installs}, file)
    try_versions.keep({**Combination().versions, "installs": "ok"}, file)
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    assert [(row["torch"], row["installs"]) for row in rows] == [("2.11.0", "ok"), ("2.13.0", "ok")]


def test_a_row_without_a_check_or_with_a_failed_one_has_not_passed() -> None:
    row = {"installs": "ok", **dict.fromkeys(CHECKS, "ok: passed")}
    assert try_versions.succeeded(row)
    for name in row:
        assert not try_versions.succeeded({**row, name: "failed with exit code 1: x"})
        assert not try_versions.succeeded({key: said for key, said in row.items() if key != name})
