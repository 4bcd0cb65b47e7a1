"""Loops without megatron-core with graphs, by their example: each way of sharding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.conftest import skip_without
from tests.functional.other_blocks import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "standalone_transformer.py"
OTHER = "-m tests.functional.other_blocks"


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("sharding", ["megatron-fsdp", "megatron-fsdp-v2", "fsdp2", "ddp"])
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


def test_a_model_of_torchtitan_trains_the_eager_numbers() -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.2.2")
    ended = run([str(Path(__file__).with_name("titan_model.py"))])
    assert "bitwise equal" in ended.stdout
    # 3 graphs; 3 layers x 9 steps x 2 microbatches; one evaluation.
    assert "'captured': 3, 'replayed': 54, 'eager': 3, 'mismatched': 0" in ended.stdout


def run(script: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script on two GPUs, which has to exit with ``status``."""
    skip_without(2)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += script
    ended = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == status, ended.stderr[-3000:]
    return ended
