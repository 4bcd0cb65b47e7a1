"""A capture as the user sees it, and what its record holds, with the real model and the tape."""

from pathlib import Path
from typing import Any

import pytest

from megatron_cg import telemetry as reporting
from megatron_cg.errors import CaptureError
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.telemetry import recording
from megatron_cg.tools.record.read_record import captured_after, read_run
from megatron_cg.tools.record.record import Recorder
from tests.unit.trainers import trainer_of

MIB = 2**20


class Failing(TapeBackend):
    def capture(self, *args: Any, **options: Any) -> Any:
        raise CaptureError("on purpose")


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
    with trainer_of(model) as trainer, recording(recorder):
        trainer.step()
        with pytest.raises(CaptureError, match="on purpose"):
            trainer.capture(Failing())
        monkeypatch.setattr(reporting, "memory", lambda: points.pop(0))
        for number in range(3):
            if number == 1:
                trainer.capture(TapeBackend())
            loss, norm = trainer.step()
            recorder.add_step({"lm loss": loss}, norm, False, 0.0)
    recorder.finish([])
    data = read_run(tmp_path)[0]
    failed, entry = data["captures"]
    assert captured_after(data) == 1
    assert failed["error"] == "CaptureError: on purpose" and failed["graphs"] == 0
    assert (entry["after_step"], entry["layers"], entry["graphs"]) == (1, 2, 2)
    assert entry["error"] is None and entry["memory"] == {"before": before, "after": after}
    assert entry["seconds"] > 0
    assert failed["fast_path"] is None and "unshard" in entry["fast_path"]["on"]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "megatron_cg:" in line)
    assert line.startswith("megatron_cg: graphs captured: 2, of 2 layers, in ")
    assert line.endswith("; +312 MiB of GPU memory allocated, -4 MiB reserved")
