"""Records: written around Megatron's own module, with loops made for the test, and read back."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cg
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.telemetry import note
from megatron_cg.tools.record.compare import RecordError, read_run
from megatron_cg.tools.record.record import Recorder, digest, install_recorder, parameter_digests
from tests.unit.ranks import on_ranks

STEPS = 5
LOSS = 1 / 3


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's module with a short ``train``, which calls ``each`` after every step."""
    import megatron.training.training as module

    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any,
                   iteration: Any = None) -> Any:  # fmt: skip
        with torch.no_grad():
            model[0].weight.add_(1)
        return {"lm loss": torch.tensor([LOSS])}, 0, False, False, 0, 0.1, 0, None

    def train(forward_step_func: Any, model: Any, each: Callable[[int], None]) -> str:
        for number in range(STEPS):
            module.train_step(None, None, model, None)
            each(number)
        return "trained"

    def evaluate(forward_step_func: Any, data_iterator: Any, model: Any) -> Any:
        return {"lm loss": torch.tensor(0.25)}, None, False

    monkeypatch.setattr(module, "train_step", train_step)
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "evaluate", evaluate)
    monkeypatch.setenv("RANK", "0")
    before = module.train, module.train_step, module.training_log, module.evaluate
    yield module
    megatron_cg.disable()
    assert (module.train, module.train_step, module.training_log, module.evaluate) == before


@pytest.fixture
def model() -> list[torch.nn.Module]:
    return [torch.nn.Linear(2, 2)]


@pytest.fixture
def recorded(training: Any, tmp_path: Path) -> Iterator[Any]:
    undo = install_recorder(tmp_path)
    yield training
    undo()
    undo()


def read(directory: Path) -> dict[str, Any]:
    return read_run(directory)[0]


def nothing(_number: int) -> None:
    """A step after which nothing happens."""


def test_every_step_and_the_last_parameters_are_recorded(
    recorded: Any, model: list[torch.nn.Module], tmp_path: Path
) -> None:
    assert list(tmp_path.iterdir()) == []

    def each(number: int) -> None:
        if number == 3:
            recorded.evaluate(None, None, None)

    assert recorded.train(None, model, each) == "trained"
    # A note after training is written too.
    note("graphs", {"captured": 1})
    data = read(tmp_path)
    assert data["finished"] and data["error"] is None and data["graphs"] == {"captured": 1}
    assert len(data["steps"]) == STEPS
    step = data["steps"][1]
    assert step["losses"] == {"lm loss": float(torch.tensor(LOSS))}
    assert step["grad_norm"] == 0.1 and step["skipped"] is False and step["milliseconds"] > 0
    # Losses of an evaluation are with those of the step before it.
    losses = [step["losses"] for step in data["steps"]]
    assert losses[3] == {**losses[2], "evaluation lm loss": 0.25} and losses[4] == losses[2]
    assert data["parameters"] == {
        f"parameter:{name}": digest(value) for name, value in model[0].named_parameters()
    }
    assert data["versions"]["megatron-core"]


def test_a_step_ends_when_its_loss_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast path lets ``train_step`` return while the optimizer's kernels run."""
    now = 1.0

    class Loss:
        def __float__(self) -> float:
            nonlocal now
            now += 0.5
            return LOSS

    monkeypatch.setattr("time.perf_counter", lambda: now)
    recorder = Recorder(tmp_path)
    recorder.add_step({"lm loss": Loss()}, 0.1, False, 0.75)
    assert json.loads(recorder._lines[-1])["steps"][0]["milliseconds"] == 750.0


def test_the_flag_records_an_eager_run_too(
    training: Any, model: list[torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    megatron_cg.enable()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = ["--use-megatron-fsdp", "--cg-record", str(tmp_path), "--log-interval", "3"]
    arguments.validate_args(parser.parse_args(words), {})
    training.train(None, [*model, torch.nn.Linear(2, 2)], nothing)
    data = read(tmp_path)
    assert data["finished"] and len(data["steps"]) == STEPS
    # The chunks of a model are kept apart.
    assert set(data["parameters"]) == {
        f"{chunk}:parameter:{name}" for chunk in (0, 1) for name in ("weight", "bias")
    }


def test_a_run_that_exits_is_recorded_whole_and_one_that_fails_says_so(
    recorded: Any, model: list[torch.nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        recorded.train(None, model, sys.exit)
    data = read(tmp_path)
    assert data["finished"] and data["error"] is None and len(data["parameters"]) == 2
    undo = install_recorder(tmp_path / "failed")
    with pytest.raises(ZeroDivisionError):
        recorded.train(None, model, lambda number: 1 // (1 - number))
    undo()
    data = read(tmp_path / "failed")
    assert not data["finished"] and data["error"].startswith("ZeroDivisionError: ")
    assert len(data["steps"]) == 2 and data["parameters"] == {}


def test_a_killed_run_has_left_what_it_had_done(
    recorded: Any, model: list[torch.nn.Module], tmp_path: Path
) -> None:
    path, seen = tmp_path / "rank0.jsonl", []

    def look(_number: int) -> None:
        text = path.read_text()
        seen.append(len(read(tmp_path)["steps"]))
        # As if it had been killed in the middle of a write.
        path.write_text(text + '{"steps": [{"los')
        assert len(read(tmp_path)["steps"]) == seen[-1] and not read(tmp_path)["finished"]
        path.write_text(text)

    recorded.train(None, model, look)
    assert seen == [1, 2, 3, 4, 5]


def test_a_record_that_cannot_be_written_ends_no_run_and_is_told_once(
    training: Any, model: list[torch.nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    undo = install_recorder(no_folder)
    training.train(None, model, nothing)
    note("graphs", {})
    with pytest.raises(ZeroDivisionError):
        training.train(None, model, lambda number: 1 // number)
    undo()
    (told,) = caplog.messages
    assert f"{no_folder} cannot be written" in told and "Training goes on" in told


def test_another_signature_or_result_is_refused_by_name(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any) -> Any:
        return {}, 0

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", train_step)
        undo = install_recorder(tmp_path)
        with pytest.raises(UpstreamChangedError, match="returns eight values"):
            training.train_step(None, None, None, None)
        undo()
        # The last that is replaced: the others are undone.
        patch.setattr(training, "evaluate", lambda config: None)
        before = training.train, training.train_step, training.evaluate
        with pytest.raises(UpstreamChangedError, match=r"megatron-core .*training:evaluate is not"):
            install_recorder(tmp_path)
        assert (training.train, training.train_step, training.evaluate) == before
    assert list(tmp_path.iterdir()) == []


def line(**changed: Any) -> str:
    header = {"format": 1, "rank": 0, "world_size": 1, "versions": {}, "device": "cpu"}
    return json.dumps(header | {"command": []} | changed) + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 0: KeyError: 'rank'"),
        ("[]\n", r"line 1: AttributeError: 'list'"),
        (line(format=2), "it is of another version, so record the run again"),
        (line() + '{"steps": 3}\n', "line 2: TypeError: 'int'"),
        (line() + '{"evaluation": {}}\n', "line 2: IndexError"),
        (line(rank=1, world_size=2), "it is of rank 1 of 2"),
        (line(world_size=0), "it is of rank 0 of 0"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused_in_one_line(
    text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "rank0.jsonl").write_text(text)
    with pytest.raises(RecordError, match=rf"rank0\.jsonl is not a record.*({told})") as refused:
        read_run(tmp_path)
    assert "\n" not in str(refused.value)


def test_folders_without_the_records_of_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no record"):
        read_run(tmp_path)
    (tmp_path / "rank0.jsonl").write_text(line(world_size=2))
    (tmp_path / "rank1.jsonl").write_text(line(rank=1, world_size=3))
    with pytest.raises(RecordError, match="records of runs with 2 and 3 ranks"):
        read_run(tmp_path)


STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def digests_change() -> dict[str, list[bool]]:
    """By strategy, whether digests are others after this rank's weights, or all others, changed."""
    from megatron.core import parallel_state

    from megatron_cg.tape.train import build
    from megatron_cg.tape.training_plan import CpuModelConfig

    found: dict[str, list[bool]] = {strategy: [] for strategy in STRATEGIES}
    for strategy, changed in found.items():
        options = {"data_parallel_sharding_strategy": strategy}
        model: Any = build(CpuModelConfig(layers=1, hidden_size=16, fsdp_options=options))
        groups = model.module.param_and_grad_buffer.parameter_groups
        for own in (True, False):
            before = parameter_digests(model)
            for weights in [group.model_weight_buffer for group in groups]:
                if weights is not None:
                    index = weights.shard_bucket_index
                    mine = weights.data[index.local_data_index :][: index.size]
                    kept = mine.clone()
                    (mine if own else weights.data).add_(1)
                    if not own:
                        mine.copy_(kept)
            changed.append(parameter_digests(model) != before)
        parallel_state.destroy_model_parallel()
    return found


def test_copies_of_other_ranks_weights_are_left_out() -> None:
    """Their state at the end of a run is random where only the optimizer's are sharded."""
    for rank in on_ranks(digests_change):
        assert rank == {strategy: [True, False] for strategy in STRATEGIES}


def test_a_digest_sees_one_bit_the_dtype_and_the_shape() -> None:
    tensor = torch.linspace(0, 1, 8).to(torch.float8_e4m3fn)
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
