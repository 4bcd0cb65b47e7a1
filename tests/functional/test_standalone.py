"""Loops without megatron-core with graphs, by their example: each way of sharding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.conftest import skip_without

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "standalone_transformer.py"


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("sharding", ["megatron-fsdp", "megatron-fsdp-v2", "fsdp2", "ddp"])
def test_the_example_trains_the_eager_numbers_though_its_loop_keeps_the_loss(
    sharding: str, backend: str
) -> None:
    ended = run([str(EXAMPLE), "--compare", "--sharding", sharding, "--backend", backend])
    assert "all parameter shards: bitwise equal" in ended.stdout
    assert "'eager': 0," in ended.stdout and "'replayed': 0" not in ended.stdout


def test_a_model_of_torchtitan_trains_the_eager_numbers() -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.2.2")
    ended = run([str(Path(__file__).with_name("titan_model.py"))])
    assert "bitwise equal" in ended.stdout
    # 3 graphs; 3 layers x 9 steps x 2 microbatches; one evaluation.
    assert "'captured': 3, 'replayed': 54, 'eager': 3, 'mismatched': 0" in ended.stdout


def run(script: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a script on two GPUs."""
    skip_without(2)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += script
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended
