"""The recorder around Megatron's own module, with training loops made for the test."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.telemetry.record import exact, install_recorder, note
from megatron_cg.telemetry.record_shards import digest, parameter_digests


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's module with a ``train`` of two steps, each called through the module."""
    import megatron.training.training as module

    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any) -> Any:
        with torch.no_grad():
            model[0].weight.add_(1)
        return {"lm loss": torch.tensor([1 / 3])}, 0, False, False, 0, 0.1, 0, None

    def train(forward_step_func: Any, model: Any, end: Callable[[], None]) -> str:
        for _ in range(2):
            module.train_step(forward_step_func, None, model, None)
        end()
        return "trained"

    monkeypatch.setattr(module, "train_step", train_step)
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setenv("RANK", "3")
    return module


def read(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((directory / "rank3.json").read_text())
    return data


def test_every_step_and_the_last_parameters_are_recorded(training: Any, tmp_path: Path) -> None:
    model = [torch.nn.Linear(2, 2)]
    undo = install_recorder(tmp_path)
    assert training.train(None, model, lambda: note("graphs", {"captured": 1})) == "trained"
    undo()

    data = read(tmp_path)
    assert data["rank"] == 3 and data["finished"] and data["error"] is None
    assert data["graphs"] == {"captured": 1}
    assert len(data["steps"]) == 2
    step = data["steps"][1]
    single = float(torch.tensor(1 / 3))
    assert step["losses"] == {"lm loss": {"hex": single.hex(), "value": single}}
    assert step["grad_norm"]["hex"] == (0.1).hex() and step["skipped"] is False
    assert step["milliseconds"] > 0
    assert data["parameters"] == {
        f"parameter:{name}": digest(value) for name, value in model[0].named_parameters()
    }
    assert data["versions"]["megatron-core"]


def test_undo_puts_back_the_same_functions(training: Any, tmp_path: Path) -> None:
    before = training.train, training.train_step
    undo = install_recorder(tmp_path)
    assert (training.train, training.train_step) != before
    undo()
    undo()
    assert (training.train, training.train_step) == before
    note("graphs", {})  # nothing records any more
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exits_is_recorded_whole(training: Any, tmp_path: Path) -> None:
    undo = install_recorder(tmp_path)
    with pytest.raises(SystemExit):
        training.train(None, [torch.nn.Linear(2, 2)], sys.exit)
    undo()
    data = read(tmp_path)
    assert data["finished"] and data["error"] is None and len(data["parameters"]) == 2


def test_a_run_that_fails_says_so(training: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    undo = install_recorder(tmp_path)
    with pytest.raises(ValueError, match="on purpose"):
        training.train(None, [torch.nn.Linear(2, 2)], fail)
    undo()
    data = read(tmp_path)
    assert not data["finished"] and data["error"] == "ValueError: on purpose"
    assert len(data["steps"]) == 2 and data["parameters"] == {}


def test_a_note_after_training_is_written(training: Any, tmp_path: Path) -> None:
    undo = install_recorder(tmp_path)
    training.train(None, [torch.nn.Linear(2, 2)], lambda: None)
    note("graphs", {"replayed": 7})
    undo()
    assert read(tmp_path)["graphs"] == {"replayed": 7}


def test_chunks_of_a_model_are_kept_apart(training: Any, tmp_path: Path) -> None:
    undo = install_recorder(tmp_path)
    training.train(None, [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], lambda: None)
    undo()
    assert set(read(tmp_path)["parameters"]) == {
        f"{chunk}:parameter:{name}" for chunk in (0, 1) for name in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["train", "train_step"])
def test_another_signature_is_refused_by_name(
    name: str, training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, name, lambda config: None)
    before = training.train, training.train_step
    with pytest.raises(UpstreamChangedError, match=rf"megatron-core .*training:{name} is not"):
        install_recorder(tmp_path)
    assert (training.train, training.train_step) == before


def test_another_result_of_a_step_is_refused(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any) -> Any:
        return {}, 0

    monkeypatch.setattr(training, "train_step", train_step)
    undo = install_recorder(tmp_path)
    with pytest.raises(UpstreamChangedError, match="returns eight values"):
        training.train(None, [torch.nn.Linear(2, 2)], lambda: None)
    undo()


def test_megatrons_own_functions_are_as_relied_on(tmp_path: Path) -> None:
    install_recorder(tmp_path)()


@pytest.mark.parametrize("number", [1 / 3, -0.0, 5e-324, math.inf])
def test_numbers_keep_every_bit(number: float) -> None:
    written = json.loads(json.dumps(exact(number), allow_nan=False))
    read_back = float.fromhex(written["hex"])
    assert read_back == number and math.copysign(1, read_back) == math.copysign(1, number)


def test_nan_is_written_as_json_allows() -> None:
    assert exact(torch.tensor(math.nan)) == {"hex": "nan", "value": "nan"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_sees_one_bit_the_dtype_and_the_shape(dtype: torch.dtype) -> None:
    tensor = torch.linspace(0, 1, 8).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    others = (changed, tensor.reshape(2, 4), tensor.view(torch.uint8))
    assert len({digest(tensor), *map(digest, others)}) == 4
    assert digest(tensor[:0]) != digest(tensor)


def test_under_fsdp_main_and_model_weights_are_told_apart(dense_model: Any) -> None:
    buffer = dense_model.module.param_and_grad_buffer
    before = parameter_digests(dense_model)
    names = {buffer.param_to_name[parameter] for parameter in buffer.params}
    assert {name.partition(":")[2] for name in before} == names
    for group in buffer.parameter_groups:
        if group.main_weight_buffer is not None:
            group.main_weight_buffer.data.add_(1)
    after = parameter_digests(dense_model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.startswith("main:")} != set()


def test_losses_of_an_evaluation_are_compared_with_the_step_before_it(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(forward_step_func: Any, data_iterator: Any, model: Any) -> Any:
        return {"lm loss": torch.tensor(0.25)}, None, False

    monkeypatch.setattr(training, "evaluate", evaluate)
    undo = install_recorder(tmp_path)
    training.train(None, [torch.nn.Linear(2, 2)], lambda: training.evaluate(None, None, None))
    undo()
    first, second = (step["losses"] for step in read(tmp_path)["steps"])
    assert list(first) == ["lm loss"]
    assert second["evaluation lm loss"] == exact(0.25)
    assert training.evaluate is evaluate
