"""Damaged and foreign records: each gives one line that says what is wrong, and never hangs."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.telemetry.record_schema import RecordError, read_run
from megatron_cg.tools.cli.main import main
from tests.unit.tools.report.made_up import make_record

Keys = tuple[str | int, ...]
OTHERS: tuple[Any, ...] = (
    *(None, True, -1, 0.5, "text", "\ud800", [], {}, [1], {"a": 1}, 2**64, math.nan, math.inf),
    [[[]]],
    {"hex": 1},
)
NOTED = ("value",)
"""Fields that no code relies on."""
EAGER_RECORD = "align --backend tape --nproc 1 --steps 4 --eager-record"


def small_record() -> dict[str, Any]:
    """All that a record can hold, and little of it."""
    record = make_record(steps=7, layers=2) | {"error": "an error"}
    votes = {"votes": 1, "issuing_ms": 0.0, "waiting_ms": 0.1, "exchanging_ms": 0.0}
    record |= {"agreement": votes, "peak_reserved_bytes": 1}
    for name in ("steps", "intervals"):
        record[name] = record[name][-1:]
    record["captures"][0]["error"] = "another"
    record["events"] = [{"after_step": 1, "level": "warning", "text": "a mismatch"}]
    return record


def fields(value: Any, at: Keys = ()) -> Iterator[Keys]:
    """The place of every value in a record; of rows, only the first."""
    yield at
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in NOTED:
                yield from fields(item, (*at, name))
    elif isinstance(value, list) and value:
        yield from fields(value[0], (*at, 0))


def get(record: Any, at: Keys) -> Any:
    for key in at:
        record = record[key]
    return record


def replaced(record: Any, at: Keys, value: Any) -> Any:
    if not at:
        return value
    made = copy.deepcopy(record)
    get(made, at[:-1])[at[-1]] = value
    return made


def kind(value: Any) -> str:
    """What a value is to a reader of JSON."""
    return "number" if type(value) in (int, float) else type(value).__name__


def written(directory: Path, record: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "rank0.json").write_text(json.dumps(record))
    return directory


def refused(directory: Path, what: object = "") -> str:
    with pytest.raises(RecordError) as caught:
        pytest.fail(f"accepted {what}: {sorted(read_run(directory))}")
    (line,) = str(caught.value).splitlines()
    assert len(line) < 300 + len(str(directory))
    return line


MAY_BE_NONE = {"error", "grad_norm", "memory", "graphs", "gpu_bytes", "before", "after", "highest"}
MAY_BE_NONE |= {"warmed up", "captured", "torch", "megatron-cg"}
FREE = {("setup", "model", "num_layers")} | {("machine", n) for n in ("gpu", "gpus", "driver")}
"""Fields that are shown whatever their type is."""


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_another_type_in_any_field_is_refused_with_its_place(other: Any, tmp_path: Path) -> None:
    record = small_record()
    checked = 0
    for at in fields(record):
        value = get(record, at)
        if kind(other) == kind(value) or at in FREE:
            continue
        if other is None and MAY_BE_NONE.intersection(at[-1:]):
            continue
        line = refused(written(tmp_path, replaced(record, at, other)), at)
        assert "rank0.json is not a record of this package: " in line
        if at:
            assert str(at[-1]) in line or f"[{at[-1]}]" in line
        checked += 1
    assert checked > 50


def test_a_field_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in small_record():
        record = small_record()
        del record[name]
        if name in ("captured_after_step", "agreement") or name.startswith("peak_"):
            assert set(read_run(written(tmp_path, record))) == {0}
        else:
            assert name in refused(written(tmp_path, record))


@pytest.mark.parametrize("form", [0, 1, 3, True, 2.5, "2", None])
def test_a_record_of_another_format_is_refused(form: Any, tmp_path: Path) -> None:
    line = refused(written(tmp_path, small_record() | {"format": form}))
    assert "its format is" in line and "record the run again" in line


@pytest.mark.parametrize("text", ["", "0x", "1.0.0", "0x1p99999", "text", "\ud800"])
def test_a_number_that_float_hex_did_not_write(text: str, tmp_path: Path) -> None:
    at = ("steps", 0, "losses", "lm loss", "hex")
    line = refused(written(tmp_path, replaced(small_record(), at, text)))
    assert "steps[0].losses.lm loss.hex is" in line


def test_ranks_that_cannot_be(tmp_path: Path) -> None:
    assert "its rank is 0, and its world_size 0" in refused(
        written(tmp_path, small_record() | {"world_size": 0})
    )
    assert "it is of rank 1" in refused(written(tmp_path, small_record() | {"rank": 1}))
    (tmp_path / "rank1.json").write_text(json.dumps(small_record() | {"rank": 1, "world_size": 3}))
    line = refused(written(tmp_path, small_record() | {"world_size": 2}))
    assert "runs with 2 and 3 ranks" in line


def cut(path: Path) -> None:
    text = json.dumps(small_record())
    path.write_text(text[: len(text) // 2])


def nested(path: Path) -> None:
    path.write_text('{"format": ' + "[" * 100_000 + "]" * 100_000 + "}")


def nested_inside(path: Path) -> None:
    text = json.dumps(small_record() | {"machine": {"gpu": "HERE"}})
    path.write_text(text.replace('"HERE"', '{"a":' * 100_000 + "1" + "}" * 100_000))


def of_zeros(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": cut,
    "nested": nested,
    "nested inside": nested_inside,
    "a terabyte of zeros": of_zeros,
    "empty": Path.touch,
    "a list": lambda path: path.write_text("[]"),
    "text": lambda path: path.write_text("loss 1.0"),
    "no unicode": lambda path: path.write_bytes(b"{\xff}"),
    "digits": lambda path: path.write_text('{"rank": ' + "9" * 10_000 + "}"),
    "a pipe": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("command", ["report", EAGER_RECORD])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_one_line_and_exit_code_2(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[name](tmp_path / "rank0.json")
    assert main([*command.split(), str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "rank0.json " in said


@pytest.mark.parametrize("command", ["report", EAGER_RECORD, "report {good} --against"])
def test_a_folder_that_is_missing_or_none_is_told_as_such(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "good", small_record())
    (tmp_path / "file").touch()
    for name, told in (("absent", "there is no folder"), ("file", "is not a folder")):
        words = [word.format(good=good) for word in command.split()]
        assert main([*words, str(tmp_path / name)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert told in said and str(tmp_path / name) in said


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder and a record that this process may not read, also where tests run as root."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    written(root / "folder", small_record()).chmod(0)
    (written(root / "file", small_record()) / "rank0.json").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield root
    finally:
        os.seteuid(user)
        (root / "folder").chmod(0o755)
        shutil.rmtree(root)


def test_what_may_not_be_read_is_told_as_such(locked: Path) -> None:
    assert refused(locked / "folder").endswith("folder cannot be read: Permission denied.")
    assert refused(locked / "file").endswith("rank0.json cannot be read: Permission denied.")


def test_a_page_is_made_of_whatever_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty, absent and non-finite values cause no traceback."""
    from megatron_cg.tools.report import plots

    # Figures are drawn and not written as files, which takes most of the time.
    monkeypatch.setattr(plots, "png", lambda _figure: b"")
    record = small_record()
    accepted = 0
    largest = sys.float_info.max
    for at in fields(record):
        others: list[Any] = ["inf", "nan", largest.hex()]
        if at[-1:] != ("hex",):
            others = [None, [], {}, 0]
        for other in others:
            one = written(tmp_path / "one", replaced(record, at, other))
            two = written(tmp_path / "two", record)
            try:
                read_run(one)
            except RecordError:
                continue
            accepted += 1
            assert main(["report", str(one), "--against", str(two)]) == 0, (at, other)
            assert capsys.readouterr().err == ""
    assert accepted > 50
