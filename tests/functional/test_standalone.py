"""Loops without Megatron's, with graphs: each way of sharding, other models, compiled layers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cg.examples import standalone_transformer as example
from tests.functional.conftest import skip_without
from tests.functional.other_blocks import BLOCKS
from tests.functional.titan import MODELS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "standalone_transformer.py"
OTHER = "-m tests.functional.other_blocks"


@pytest.mark.parametrize(
    ("sharding", "backend"),
    [
        *((sharding, "native") for sharding in example.SHARDINGS),
        *(("megatron-fsdp", "te"), ("fsdp2", "te")),
    ],
)
def test_the_example_trains_the_eager_numbers_though_its_loop_keeps_the_loss(
    sharding: str, backend: str
) -> None:
    ended = run([str(EXAMPLE), "--compare", "--sharding", sharding, "--backend", backend])
    assert_equal(ended)


def assert_equal(ended: subprocess.CompletedProcess[str]) -> None:
    assert "all parameter shards: bitwise equal" in ended.stdout
    assert "'eager': 0," in ended.stdout and "'replayed': 0" not in ended.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_units_that_recompute_themselves_or_hold_compiled_code_train_the_eager_numbers(
    block: str,
) -> None:
    assert_equal(run([*OTHER.split(), block, "--compare", "--sharding", "ddp", "--dropout", "0"]))


def test_dropout_in_what_a_unit_recomputes_is_refused_by_name() -> None:
    words = [*OTHER.split(), "recomputed", "--compare", "--sharding", "ddp", "--dropout", "0.1"]
    ended = run(words, status=1)
    assert "recomputes activations and draws random numbers in that" in ended.stderr


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_torchtitan_trains_the_eager_numbers(model: str) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0")
    if "simple_fsdp" in model:
        pytest.importorskip("torchtitan.experiments.graph_trainer.simple_fsdp")
    assert_equal(run(["-m", "tests.functional.titan", model, "--compare", "--sequence", "512"]))


def test_layers_compiled_without_a_gpu_train_the_eager_numbers_in_graphs(tmp_path: Path) -> None:
    skip_without(2)
    build = "tests/unit/compiled/regions.py:llama"
    words = f"-m megatron_cg.tools.cli.main precompile {build} --world-size 2 --deterministic --out"
    started([sys.executable, *words.split(), str(tmp_path)], CUDA_VISIBLE_DEVICES="")
    run(["-m", "tests.functional.compiled_layers", str(tmp_path)])


def run(script: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script on two GPUs, which has to exit with ``status``."""
    skip_without(2)
    words = "-m torch.distributed.run --standalone --nproc-per-node 2"
    return started([sys.executable, *words.split(), *script], status)


def started(words: list[str], status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        words,
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == status, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended
