"""Steps are measured around everything else, window by window, and all is put back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training
from torch.profiler import ProfilerActivity

from megatron_cg.tools.bench.measure import kinds, measured
from megatron_cg.tools.bench.measure import measurement as measurement_module
from megatron_cg.tools.bench.measure.captures import CaptureMeter
from megatron_cg.tools.bench.measure.measurement import Measurement
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.traces.idle import STEPS
from megatron_cg.upstream.patch import set_attribute

WINDOWS = Windows(warmup=1, settle=1, timed=2, probed=2, sampled=1, profiled=1)
Loop = Callable[..., Any]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of Megatron's loop one that trains nothing; returns what it has done."""
    done: list[str] = []

    def train_step(*_args: Any) -> Any:
        done.append("step")
        return {"lm loss": torch.tensor(0.5 * len(done))}, 0

    def train(steps: int) -> str:
        for _ in range(steps):
            training.train_step()
        return "trained"

    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setenv("PATH", "")
    return done


def metrics(directory: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"rank{rank}.json").read_text())
    return found


def test_each_window_measures_its_own_steps(loop: list[str], tmp_path: Path) -> None:
    with measured.measuring(WINDOWS, tmp_path):
        assert training.train(WINDOWS.steps) == "trained"
    found = metrics(tmp_path)
    assert len(loop) == WINDOWS.steps and found["finished"]
    timed = found["timed"]
    assert len(timed["step_ms"]) == 2 and all(step > 0 for step in timed["step_ms"])
    assert timed["loss"] == 2.0 and timed["memory"] is None and timed["counters"] is None
    assert found["probed"]["steps"] == 2 and found["probed"]["phases"] == []
    assert found["sampled"]["steps"] == 1 and "py-spy" in found["sampled"]["note"]
    # A trace is of a GPU.
    assert "traced" not in found and "profiled" not in found and found["device"]["gpu"] is None


def test_other_ranks_are_neither_sampled_nor_traced(
    loop: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with measured.measuring(WINDOWS, tmp_path):
        training.train(WINDOWS.steps)
    found = metrics(tmp_path, 1)
    assert "timed" in found and "probed" in found and "sampled" not in found


@contextmanager
def noted(log: list[Any], name: str) -> Iterator[None]:
    """Instead of a range, or of the phases' watch."""
    log.append(name)
    yield


@pytest.mark.parametrize(("rank", "cupti"), [(0, True), (0, False), (1, True)])
def test_the_device_is_traced_alone_before_it_is_traced_with_host_events(
    rank: int, cupti: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    monkeypatch.setenv("RANK", str(rank))
    for name in ("synchronize", "machine"):
        monkeypatch.setattr(measurement_module, name, lambda: None)
    for name in ("reset_peaks", "memory"):
        monkeypatch.setattr(kinds, name, lambda: None)
    monkeypatch.setattr(kinds, "watching", lambda *_args: noted(log, "phases"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    profile = SimpleNamespace(
        start=lambda: None,
        stop=lambda: log.append("stop"),
        export_chrome_trace=lambda path: log.append(Path(path).name),
    )

    def profiled(activities: Any) -> Any:
        log.append({activity.name for activity in activities})
        return profile

    monkeypatch.setattr(torch.profiler, "profile", profiled)
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: noted(log, name))
    supported = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if cupti else set())
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: supported)
    windows = Windows(warmup=0, settle=0, timed=1, probed=0, profiled=2)
    measurement = Measurement(windows, tmp_path)
    for _ in range(windows.steps):
        measurement.before_step()
        log.append("step")
        measurement.after_step()
    measurement.close()
    steps = ["step", "step"]
    alone = [{"CUDA"}, *steps, "stop", "device_trace.json"] if cupti else steps
    whole = [{"CPU", "CUDA"}, STEPS, "phases", *steps, "stop", "trace.json"]
    assert log == (["step", *alone, *whole, "step"] if rank == 0 else ["step"] * 6)
    found = metrics(tmp_path, rank)
    traced = {"steps": 2, "trace": "device_trace.json"} if rank == 0 and cupti else None
    assert found.get("traced") == traced and ("profiled" in found) == (rank == 0)


def test_a_step_is_timed_with_what_others_put_around_it(loop: list[str], tmp_path: Path) -> None:
    order: list[str] = []

    def around(*_args: Any) -> Any:
        order.append("inside" if training.train_step is not around else "outside")
        return {}, 0

    with measured.measuring(WINDOWS, tmp_path):
        undo = set_attribute(training, "train_step", around)
        training.train(3)
        undo()
    assert order == ["inside"] * 3


def test_everything_is_put_back_also_after_an_error(loop: list[str], tmp_path: Path) -> None:
    owners = (
        (training, "train"),
        (training, "train_step"),
        (training.TECudaGraphHelper, "create_cudagraphs"),
        (training.FullCudaGraphWrapper, "__call__"),
        (torch.cuda.graph, "__enter__"),
    )
    before = [vars(owner).get(name) for owner, name in owners]

    def fails(_steps: int) -> None:
        training.train_step()
        assert vars(torch.cuda.graph)["__enter__"] is not before[-1]
        raise RuntimeError("out of memory")

    undo = set_attribute(training, "train", fails)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        measured.measuring(WINDOWS, tmp_path),
    ):
        training.train(3)
    undo()
    assert [vars(owner).get(name) for owner, name in owners] == before
    found = metrics(tmp_path)
    assert not found["finished"] and found["error"] == "RuntimeError: out of memory"


def test_metrics_are_on_disk_after_each_window(loop: list[str], tmp_path: Path) -> None:
    measurement = Measurement(WINDOWS, tmp_path)
    for _ in range(5):
        measurement.before_step()
        measurement.after_step(1.0)
    assert metrics(tmp_path)["timed"]["loss"] == 1.0 and not metrics(tmp_path)["finished"]
    measurement.abandon(ValueError("x"))
    assert "probed" not in metrics(tmp_path) and metrics(tmp_path)["error"] == "ValueError: x"


def test_counters_are_those_of_the_timed_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"replayed": 10}
    windows = Windows(warmup=0, settle=1, timed=2, probed=0, profiled=0)
    measurement = Measurement(windows, tmp_path)
    monkeypatch.setattr(measurement.meter, "counts", lambda: dict(counts))
    for _ in range(windows.steps):
        measurement.before_step()
        counts["replayed"] += 4
        measurement.after_step()
    measurement.close()
    assert metrics(tmp_path)["timed"]["counters"] == {"replayed": 8}
    assert metrics(tmp_path)["finished"]


def test_a_capture_is_noted_with_the_step_it_came_after(tmp_path: Path) -> None:
    measurement = Measurement(Windows(), tmp_path)
    meter = measurement.meter
    measurement.before_step()
    with meter.measuring():
        assert meter._began is not None
        meter._began |= {"warmup": 1.0, "first graph": 3.5}
    with pytest.raises(ValueError), meter.measuring():
        raise ValueError
    one, failed = measurement.data["captures"]
    assert one["after_step"] == 1 and one["warmup_seconds"] == 2.5 and one["seconds"] > 0
    assert failed["error"] == "ValueError" and failed["warmup_seconds"] is None


def test_partial_and_full_captures_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wrapper of a full iteration before its capture, and a helper that captures none."""
    noted: list[Any] = []
    meter = CaptureMeter(noted.append)
    monkeypatch.setattr(training.TECudaGraphHelper, "create_cudagraphs", lambda helper: None)
    monkeypatch.setattr(training.FullCudaGraphWrapper, "__init__", lambda wrapper: None)
    with meter.installed():
        helper = training.TECudaGraphHelper.__new__(training.TECudaGraphHelper)
        helper.create_cudagraphs()
        assert len(noted) == 1 and meter.helper is helper and meter.counts() is None
        wrapper = training.FullCudaGraphWrapper()
        wrapper.cuda_graph_warmup_steps = 0
        with pytest.raises(AssertionError, match="positional"):
            wrapper(1, forward_only=False)
        wrapper.cuda_graph_warmup_steps = 3
        with pytest.raises(AssertionError, match="positional"):
            wrapper(1, forward_only=False)
    assert [metrics["error"] for metrics in noted] == ["", "AssertionError"]
    monkeypatch.setitem(training.FullCudaGraphWrapper.cuda_graph, "training", "a graph")
    meter.release()
    assert training.FullCudaGraphWrapper.cuda_graph["training"] is None
