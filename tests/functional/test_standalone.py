"""The standalone megatron_fsdp package with graphs, by its example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.functional.conftest import skip_without

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "standalone_transformer.py"


def test_the_example_trains_the_eager_numbers_though_its_loop_keeps_the_loss() -> None:
    skip_without(2)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(EXAMPLE), "--compare"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "all parameter shards: bitwise equal" in ended.stdout
    assert "'eager': 0," in ended.stdout and "'replayed': 0" not in ended.stdout
