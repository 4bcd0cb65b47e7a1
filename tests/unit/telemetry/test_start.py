"""``--cg-report``: wired, undone, and a record that costs a run little."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cg
from megatron_cg.telemetry import record
from megatron_cg.telemetry.memory_lines import memory
from megatron_cg.telemetry.record import Recorder, install_recorder, note, note_step, recording
from megatron_cg.telemetry.record_schema import read_run


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's module with a short ``train``, and all of it as before at the end."""
    import megatron.training.training as module

    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any,
                   iteration: Any = None) -> Any:  # fmt: skip
        return {"lm loss": torch.tensor([0.5])}, 0, False, False, 0, 0.1, 0, None

    def train(forward_step_func: Any, model: Any, each: Callable[[int], None]) -> None:
        for number in range(5):
            module.train_step(None, None, model, None)
            each(number)

    monkeypatch.setattr(module, "train_step", train_step)
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setenv("RANK", "0")
    before = module.train, module.train_step, module.training_log
    yield module
    megatron_cg.disable()
    assert (module.train, module.train_step, module.training_log) == before


def read(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((directory / "rank0.json").read_text())
    return data


def test_the_flag_records_an_eager_run_too(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    megatron_cg.enable()
    before = training.training_log
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = ["--use-megatron-fsdp", "--cg-report", str(tmp_path), "--log-interval", "2"]
    arguments.validate_args(parser.parse_args(words), {})
    assert training.training_log is not before
    training.train(None, [torch.nn.Linear(2, 2)], lambda _number: None)
    data = read(tmp_path)
    assert data["finished"] and len(data["steps"]) == 5
    # Every second step, and the last: by --log-interval.
    assert [row["step"] for row in data["intervals"]] == [2, 4, 5]
    assert data["parameters"] == {}
    assert data["machine"]["python"] and data["command"]


def test_both_flags_write_both_records(training: Any, tmp_path: Path) -> None:
    undo = [install_recorder(tmp_path / "a"), install_recorder(tmp_path / "b", digests=False)]
    training.train(None, [torch.nn.Linear(2, 2)], lambda number: note_step("phases", {"x": number}))
    for back in reversed(undo):
        back()
    one, two = read(tmp_path / "a"), read(tmp_path / "b")
    assert len(one["parameters"]) == 2 and two["parameters"] == {}
    assert [step["phases"]["x"] for step in two["steps"]] == [0, 1, 2, 3, 4]
    assert len(one["steps"]) == len(two["steps"]) == 5


def test_a_run_under_way_has_left_what_it_has_done(training: Any, tmp_path: Path) -> None:
    undo = install_recorder(tmp_path, write_seconds=0.0)
    seen: list[int] = []

    def look(_number: int) -> None:
        if (tmp_path / "rank0.json").exists():
            data = read(tmp_path)
            assert not data["finished"]
            seen.append(len(data["steps"]))

    training.train(None, [torch.nn.Linear(2, 2)], look)
    undo()
    assert seen and seen[0] == 1
    assert read(tmp_path)["finished"]


def test_a_run_is_not_written_in_its_course_unless_asked_for(training: Any, tmp_path: Path) -> None:
    undo = install_recorder(tmp_path)
    training.train(
        None, [torch.nn.Linear(2, 2)], lambda _number: assert_empty(tmp_path)
    )  # fmt: skip
    undo()


def test_a_record_that_cannot_be_written_ends_no_run_and_is_told_once(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    undo = install_recorder(no_folder, write_seconds=0.0)
    training.train(None, [torch.nn.Linear(2, 2)], lambda _number: None)
    note("graphs", {})
    undo()
    (told,) = caplog.messages
    assert f"{no_folder} cannot be written" in told and "Training goes on" in told


def test_a_record_that_cannot_be_written_hides_no_error_of_the_run(
    training: Any, tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    undo = install_recorder(no_folder)
    with pytest.raises(ZeroDivisionError):
        training.train(None, [torch.nn.Linear(2, 2)], lambda number: 1 // number)
    with pytest.raises(SystemExit) as ended:
        training.train(None, [torch.nn.Linear(2, 2)], sys.exit)
    undo()
    assert ended.value.code == 0


def test_ranks_write_at_the_same_steps_and_a_warning_writes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = Moments()
    monkeypatch.setattr(record, "time", now)
    monkeypatch.setattr(record, "write_text", now.write)
    ranks = []
    for name, seconds in (("fast", 0.01), ("slow", 0.9)):
        now.seconds[Path(name)] = seconds
        ranks.append(Recorder(Path(name), write_seconds=60.0))
        now.wall += 37
    for _step in range(100):
        now.wall += 7
        for recorder in ranks:
            recorder.add_step({}, None, False, 0.0)
            recorder.add_event("warning", "no replay")
    fast, slow = now.written[Path("fast")], now.written[Path("slow")]
    assert len(fast) == 12 and set(slow) < set(fast)
    # A hundredth of the time: not more often than every 90 s.
    assert 4 <= len(slow) <= 700 / 90


class Moments:
    """The wall clock, and what writing into a folder takes."""

    def __init__(self) -> None:
        self.wall, self.spent = 1e9, 0.0
        self.seconds: dict[Path, float] = {}
        self.written: dict[Path, list[float]] = {}

    def time(self) -> float:
        return self.wall

    def perf_counter(self) -> float:
        return self.spent

    def write(self, path: Path, _text: str) -> None:
        self.spent += self.seconds[path.parent]
        self.written.setdefault(path.parent, []).append(self.wall)


def test_a_path_that_is_no_utf_8_leaves_a_record_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("NCCL_TOPO_FILE", "caf\udce9 \U0001f600")
    monkeypatch.setattr(sys, "argv", ["/data/caf\udce9/train.py"])
    Recorder(tmp_path).write()
    found = read_run(tmp_path)[0]
    assert found["command"] == ["/data/caf?/train.py"]
    assert found["environment"]["NCCL_TOPO_FILE"] == "caf? \U0001f600"


def assert_empty(directory: Path) -> None:
    assert list(directory.iterdir()) == []


def test_warnings_of_this_package_are_in_the_record_and_no_others(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    ours, others = (
        logging.getLogger("megatron_cg.replay.mismatch_policy"),
        logging.getLogger("elsewhere"),
    )
    with recording(recorder):
        recorder.add_step({"lm loss": 1.0}, None, False, 0.0)
        ours.warning("no replay of %s", "layer 3")
        ours.info("not worth it")
        others.warning("of somebody else")
    ours.warning("too late")
    assert recorder.data["events"] == [
        {"after_step": 1, "level": "warning", "text": "no replay of layer 3"}
    ]


def test_memory_is_none_without_a_gpu_and_torchs_own_count_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert memory() is None
    stats = {
        "allocated_bytes": {"all": {"current": 5, "peak": 7}},
        "reserved_bytes": {"all": {"current": 8, "peak": 9}},
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    assert memory() == {
        "allocated_bytes": 5,
        "reserved_bytes": 8,
        "peak_allocated_bytes": 7,
        "peak_reserved_bytes": 9,
    }
