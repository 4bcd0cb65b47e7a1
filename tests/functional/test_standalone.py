"""Loops without Megatron's, with graphs: each way of sharding, and other models."""

from pathlib import Path

import pytest

from megatron_cg.examples import standalone_transformer as example
from tests.functional.conftest import ROOT, skip_without, torchrun
from tests.functional.titan import MODELS

EXAMPLE = str(ROOT / "examples" / "standalone_transformer.py")
OTHER = ("-m", "tests.functional.other_blocks")


@pytest.fixture(autouse=True)
def _gpus() -> None:
    skip_without(2)


def assert_equal(folder: Path, *script: str) -> None:
    failure, log = torchrun([*script, "--compare"], folder)
    assert not failure, failure + log[-5000:]
    assert "all parameter shards: bitwise equal" in log
    assert "'eager': 0," in log and "'replayed': 0" not in log


@pytest.mark.parametrize(
    ("sharding", "backend"),
    [
        *((sharding, "native") for sharding in example.SHARDINGS),
        *(("megatron-fsdp", "te"), ("fsdp2", "te")),
    ],
)
def test_the_example_trains_the_eager_numbers_though_its_loop_keeps_the_loss(
    sharding: str, backend: str, tmp_path: Path
) -> None:
    assert_equal(tmp_path, EXAMPLE, "--sharding", sharding, "--backend", backend)


def test_units_that_hold_compiled_code_train_the_eager_numbers(tmp_path: Path) -> None:
    assert_equal(tmp_path, *OTHER, "--sharding", "ddp", "--dropout", "0")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_torchtitan_trains_the_eager_numbers(model: str, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0")
    if "simple_fsdp" in model:
        pytest.importorskip("torchtitan.experiments.graph_trainer.simple_fsdp")
    assert_equal(tmp_path, "-m", "tests.functional.titan", model, "--sequence", "512")
