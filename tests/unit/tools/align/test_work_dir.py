"""One ``align`` at a time in a folder, and none whose runs could not be compared."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.align_command import LOCK
from megatron_cg.tools.align.processes import LaunchError, Options, check_start
from megatron_cg.tools.cli.main import main
from tests.unit.tools.align.records import capture, make_rank


def write(directory: Path, *records: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    for record in records:
        (directory / f"rank{record['rank']}.jsonl").write_text(json.dumps(record))
    return directory


def test_a_folder_in_which_another_align_runs_is_refused_and_free_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    words = ["align", "--backend", "tape", "--text", str(text), "--work-dir", str(tmp_path)]
    started: list[Any] = []
    monkeypatch.setattr(
        "megatron_cg.tools.align.tape.run_and_compare", lambda *a: started.append(a)
    )
    with (tmp_path / LOCK).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "another align is running there" in said and not started
    main(words)
    assert len(started) == 1


def refused(eager_record: Path, tmp_path: Path, nproc: int = 2) -> str:
    with pytest.raises(LaunchError) as caught:
        check_start(Options(tmp_path / "work", 60, eager_record=eager_record), nproc)
    return str(caught.value)


def test_an_eager_record_that_cannot_be_compared_is_refused_before_the_run(tmp_path: Path) -> None:
    versions = {"torch": None}  # Not any that is installed.
    alone = write(tmp_path / "alone", make_rank())
    half = write(tmp_path / "half", make_rank(world_size=2))
    graphs = write(tmp_path / "graphs", make_rank() | {"captures": [capture(3)]})
    old = write(tmp_path / "old", make_rank() | {"versions": versions})
    assert "has 1 ranks, and this run is to have 2" in refused(alone, tmp_path)
    assert "has records of 1 of its 2 ranks, none of 1" in refused(half, tmp_path)
    assert "has graphs, so it is not of an eager run" in refused(graphs, tmp_path)
    assert "has torch none, which here is 2." in refused(old, tmp_path, 1)
    same = write(tmp_path / "same", make_rank() | {"versions": {"megatron-cg": "0.0"}})
    check_start(Options(tmp_path / "work", 60, eager_record=same), 1)


def test_an_earlier_run_is_in_the_way_before_there_is_any_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("megatron_cg.tools.align.align_command.cached", lambda *a: made.append(a))
    (tmp_path / "graphs" / "record").mkdir(parents=True)
    assert main(["align", "--backend", "tape", "--work-dir", str(tmp_path)]) == 2
    assert "holds an earlier run" in capsys.readouterr().err and not made
