"""What a record holds about its model, layout and data."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cg.telemetry import record_setup as setup
from megatron_cg.telemetry.record_setup import of_megatron, of_tape
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

PLAN = TrainingPlan()


def test_a_dataset_is_known_by_its_content_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "_WHOLE", 9)
    monkeypatch.setattr(setup, "_END", 3)
    texts = {"a": b"one", "b": b"one", "c": b"two", "d": b"123......789", "e": b"123......780"}
    found = {}
    for name, text in texts.items():
        (tmp_path / f"{name}.bin").write_bytes(text)
        found[name] = of_tape(replace(PLAN, tokens=tmp_path / name))["data"]["tokens"]
    assert found["a"] == found["b"] and len(set(found.values())) == 4
    absent = str(tmp_path / "absent")
    assert of_tape(replace(PLAN, tokens=Path(absent)))["data"]["tokens"] == absent


def test_what_is_captured_and_how_long_a_run_is_may_differ() -> None:
    other = replace(PLAN, graphs=True, steps=9, model=CpuModelConfig(graph_modules=("mlp",)))
    assert of_tape(other) == of_tape(PLAN)
    for model in (CpuModelConfig(layers=4), CpuModelConfig(experts=4), CpuModelConfig(seed=1)):
        assert of_tape(replace(PLAN, model=model)) != of_tape(PLAN)
    json.dumps(of_tape(PLAN))


def test_megatrons_arguments_are_read_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.bin").write_bytes(b"some")
    prefix = str(tmp_path / "text")
    args = SimpleNamespace(hidden_size=64, seed=7, data_path=["0.5", prefix], swiglu=True)
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", args)
    monkeypatch.setenv("RANK", "0")
    found = of_megatron()
    assert found["model"]["hidden_size"] == 64 and found["model"]["swiglu"] is True
    assert found["parallel"]["context_parallel_size"] is None and found["training"]["seed"] == 7
    share, data = found["data"]["data_path"]
    assert share == "0.5" and data.startswith("4 bytes with SHA-256 ")
    # One rank reads the data's files, even of thousands of ranks.
    monkeypatch.setenv("RANK", "1")
    assert "data_path" not in of_megatron()["data"]
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", None)
    assert of_megatron() == {}


def test_megatron_has_all_these_arguments() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {action.dest for action in parser._actions}
    # Megatron derives these from other arguments.
    known |= {"padded_vocab_size"}
    assert not {name for names in setup._NAMES.values() for name in names} - known
