"""A capture as the user sees it, and what its record holds, with the real model and the tape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.integrations.megatron.helper import units_of
from megatron_cg.integrations.megatron.layer_scopes import give_scopes
from megatron_cg.telemetry import capture_report as reporting
from megatron_cg.telemetry.capture_report import summary
from megatron_cg.telemetry.coverage_lines import NO_SUCH_PART, NOT_ASKED, NOT_SELECTED, coverage
from megatron_cg.telemetry.record import Recorder, recording
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

MIB = 2**20


@pytest.fixture
def trainer(one_rank: None) -> Iterator[Any]:
    with trainer_of(CpuModelConfig(layers=2, graph_modules=("attn",))) as made:
        made.step()
        yield made


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    with recording(made):
        yield made


def test_a_capture_is_recorded_and_said_in_one_line(
    trainer: Any, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = TapeBackend()
    trainer.capture(backend)
    (entry,) = recorder.data["captures"]
    assert (entry["layers"], entry["graphs"], entry["error"]) == (2, 2, None)
    seconds = entry["seconds"]
    assert set(seconds) == {"prepare", "warm up", "capture", "publish", "vote"}
    assert seconds["warm up"] > 0 and seconds["capture"] > 0 and seconds["vote"] == 0
    assert set(entry["memory"]) == {"before", "warmed up", "captured", "after", "highest"}
    assert set(entry["memory"].values()) == {None}
    assert [row["graphed"] for row in entry["coverage"]] == [["attn"], ["attn"]]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "megatron_cg:" in line)
    assert line.startswith("megatron_cg: 2 graphs of 2 layers captured in ")
    assert "capture" not in vars(backend)
    changed = {(change["place"], change["objects"]) for change in entry["patches"]}
    assert {("TransformerLayer.forward", 2), ("AllGatherPipeline.all_gather_params", 1)} <= changed
    json.dumps(recorder.data)


def test_every_pass_of_warmup_and_capture_is_counted(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, total: int, warmup: int) -> None:
            self.total, self.warmup, self.done, self.closed = total, warmup, 0, False
            made.append(self)

        def advance(self) -> None:
            self.done += 1

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(reporting, "capture_bar", Bar)
    trainer.capture(TapeBackend())
    (bar,) = made
    # Two layers, forward and backward, two warmups (see Trainer.capture) and the capture.
    assert (bar.warmup, bar.total, bar.done, bar.closed) == (8, 12, 12, True)


def test_counters_of_the_session_grow_in_the_record(trainer: Any, recorder: Recorder) -> None:
    for number in range(3):
        if number == 1:
            trainer.capture(TapeBackend())
        loss, norm = trainer.step()
        recorder.add_step({"lm loss": loss}, norm, False, 0.0)
    rows = json.loads(recorder.intervals.text())
    assert [row["counters"]["replayed"] for row in rows] == [0, 2, 4]
    assert [row["counters"]["captured"] for row in rows] == [0, 2, 2]
    assert all(row["memory"] is None for row in rows)


def test_a_failed_capture_is_recorded_and_leaves_the_backend_alone(
    trainer: Any, recorder: Recorder
) -> None:
    class Failing(TapeBackend):
        def capture(self, *args: Any, **options: Any) -> Any:
            raise CaptureError("on purpose")

    backend = Failing()
    with pytest.raises(CaptureError, match="on purpose"):
        trainer.capture(backend)
    (entry,) = recorder.data["captures"]
    assert entry["error"] == "CaptureError: on purpose" and entry["graphs"] == 0
    assert "capture" not in vars(backend)
    trainer.capture(TapeBackend())
    assert [entry["error"] for entry in recorder.data["captures"]][1:] == [None]


def test_graphs_stay_where_their_map_cannot_be_drawn(
    trainer: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_args: Any) -> Any:
        raise UpstreamChangedError("megatron-core", "9", "symbol", "a layer")

    monkeypatch.setattr(reporting, "coverage", gone)
    session = trainer.capture(TapeBackend())
    trainer.step()
    expect(session.counters, replayed=2)
    assert recorder.data["captures"][0]["coverage"] == []
    assert "what was graphed is not recorded" in recorder.data["events"][0]["text"]


def test_the_map_names_why_a_part_is_eager(trainer: Any) -> None:
    layers = list(trainer.model.module.module.module.decoder.layers)
    config = layers[0].config
    scopes = type(config.cuda_graph_modules[0])
    config.cuda_graph_modules = [scopes.attn, scopes.mlp]
    undo = give_scopes(layers[0], [scopes.mlp])
    first, second = coverage(trainer.model, units_of(layers[:1]))
    undo()
    assert (first["name"], first["kind"]) == ("layer 0", "TransformerLayer")
    assert first["graphed"] == ["mlp"] and first["eager"]["attn"] == NOT_SELECTED
    assert second["graphed"] == [] and second["eager"]["mlp"] == NOT_SELECTED
    assert first["eager"]["moe_router"] == second["eager"]["mamba"] == NO_SUCH_PART
    config.cuda_graph_modules = [scopes.attn]
    rows = coverage(trainer.model, units_of(layers))
    assert [row["eager"]["mlp"] for row in rows] == [NOT_ASKED] * 2
    config.cuda_graph_modules = []
    rows = coverage(trainer.model, units_of(layers[1:]))
    assert [(row["graphed"], row["eager"]) for row in rows] == [
        ([], {"layer": NOT_SELECTED}),
        (["layer"], {}),
    ]


def entry(before: int, after: int) -> dict[str, Any]:
    memory = {
        name: {"allocated_bytes": number * MIB, "reserved_bytes": 2 * number * MIB}
        for name, number in (("before", before), ("after", after))
    }
    seconds = {"prepare": 0.0, "warm up": 1.25, "capture": 0.75, "publish": 0.0, "vote": 0.04}
    return {"layers": 1, "graphs": 2, "seconds": seconds, "memory": memory}


def test_the_line_tells_memory_as_it_changed() -> None:
    assert summary(entry(100, 412)) == (
        "2 graphs of 1 layer captured in 2.0 s (warm up 1.2, capture 0.8); +312 MiB of GPU memory "
        "allocated, +624 MiB reserved"
    )
    assert "-8 MiB of GPU memory allocated" in summary(entry(100, 92))


@pytest.mark.parametrize(
    ("peaks", "highest"), [((500, 700), (700, 1)), ((900, 900), (640, 0))], ids=["rose", "did not"]
)
def test_the_highest_memory_is_exact_where_it_rose_above_all_before(
    trainer: Any,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    peaks: tuple[int, int],
    highest: tuple[int, int],
) -> None:
    seen: list[int] = []

    def memory() -> dict[str, int]:
        seen.append(1)
        first = len(seen) == 1
        now = 640 if len(seen) == 5 else 400
        return {
            "allocated_bytes": now * MIB,
            "reserved_bytes": 1000 * MIB,
            "peak_allocated_bytes": peaks[not first] * MIB,
            "peak_reserved_bytes": 1000 * MIB,
        }

    monkeypatch.setattr(reporting, "memory", memory)
    trainer.capture(TapeBackend())
    found = recorder.data["captures"][0]["memory"]["highest"]
    assert found == {"allocated_bytes": highest[0] * MIB, "exact": highest[1]}
