"""What a user sees of captures and counters: lines, Megatron's log, records, profiles."""

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_cg import telemetry
from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.telemetry import follow_log, record_to
from megatron_cg.tools.record.compare import read_run
from megatron_cg.tools.record.record import Recorder
from megatron_cg.upstream.patch import undone_after
from tests.unit.trainers import trainer_of


class Run:
    """Ten steps of Megatron's loop, with its own functions replaced where they need a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import global_vars, training

        def training_log(loss_dict: Any, iteration: int, is_first_iteration: bool = False) -> str:
            return "report_memory_flag"

        self.module, self.printed = training, list[str]()
        monkeypatch.setattr(training, "print_rank_last", self.printed.append)
        monkeypatch.setattr(training, "training_log", training_log)
        monkeypatch.setattr(global_vars, "get_args", lambda: argparse.Namespace(log_interval=5))

    def train(self, captured_before: int | None = 4) -> None:
        counters = Counters()
        before = self.module.training_log
        undo = follow_log(lambda: [counters, Counters(repeated=2)])  # of two models
        for iteration in range(1, 11):
            if iteration == captured_before:
                counters.captured += 3
            if counters.captured:
                counters.replayed += 1
            result = self.module.training_log({}, iteration, is_first_iteration=iteration == 1)
            assert result == "report_memory_flag"
        undo()
        undo()
        assert self.module.training_log is before


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_lines_tell_what_is_new_at_megatrons_intervals(run: Run) -> None:
    run.train()
    line = (
        " megatron_cg | captured: {} | replayed: {} | eager: 0 | mismatched: 0 | verified: 0 | "
        "outputs only: 0 | gradients unstable: 0 | repeated: {} | steps verified: 0 |"
    )
    assert run.printed == [line.format(3, 2, 2), line.format(0, 5, 0)]


def test_runs_without_graphs_print_nothing(run: Run) -> None:
    run.train(captured_before=None)
    assert run.printed == []


def test_another_signature_is_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.module, "training_log", lambda losses: None)
    with pytest.raises(UpstreamChangedError, match=r"training_log is not .*iteration"):
        follow_log(list)


MIB = 2**20


def test_a_capture_is_recorded_and_said_in_one_line(
    one_rank: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {"allocated_bytes": 100 * MIB, "reserved_bytes": 200 * MIB}
    after = {"allocated_bytes": 412 * MIB, "reserved_bytes": 196 * MIB}
    points = [before, after]
    recorder, model = Recorder(tmp_path), CpuModelConfig(layers=2, graph_modules=("attn",))
    with trainer_of(model) as trainer, undone_after(record_to(recorder)):
        trainer.step()
        failing = patch.object(TapeBackend, "capture", side_effect=CaptureError("on purpose"))
        with failing, pytest.raises(CaptureError, match="on purpose"):
            trainer.capture(TapeBackend())
        monkeypatch.setattr(telemetry, "memory", lambda: points.pop(0))
        for number in range(3):
            if number == 1:
                trainer.capture(TapeBackend())
            loss, norm = trainer.step()
            recorder.add_step({"lm loss": loss}, norm, False, 0.0)
    recorder.finish([])
    data = read_run(tmp_path)[0]
    failed, entry = data["captures"]
    assert failed["error"] == "CaptureError: on purpose" and failed["graphs"] == 0
    assert (entry["after_step"], entry["layers"], entry["graphs"]) == (1, 2, 2)
    assert entry["error"] is None and entry["memory"] == {"before": before, "after": after}
    assert entry["seconds"] > 0
    assert failed["fast_path"] is None and "unshard" in entry["fast_path"]["on"]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "megatron_cg:" in line)
    assert line.startswith("megatron_cg: graphs captured: 2, of 2 layers, in ")
    assert line.endswith("; +312 MiB of GPU memory allocated, -4 MiB reserved")
