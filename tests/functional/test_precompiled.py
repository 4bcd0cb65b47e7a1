"""Layers compiled in a process without a GPU, loaded on two GPUs, captured and replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.functional.conftest import skip_without

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests.functional.compiled_layers"
MODULES = {
    "compile": "megatron_cg.tools.cli.main",
    "train": "torch.distributed.run",
}


def test_loaded_code_in_graphs_trains_the_eager_numbers(tmp_path: Path) -> None:
    skip_without(2)
    build = f"{SCRIPT.replace('.', '/')}.py:llama"
    words = ["precompile", build, "--world-size", "2", "--out", str(tmp_path)]
    start("compile", *words, "--deterministic", CUDA_VISIBLE_DEVICES="")
    words = ["--standalone", "--nproc-per-node", "2", "-m", SCRIPT, str(tmp_path)]
    ended = start("train", *words)
    assert "values, bitwise equal" in ended.stdout
    for how in ("graphs", "compiled"):
        # 3 graphs; 3 layers x 9 steps x 2 microbatches.
        assert f"{how}: {{'captured': 3, 'replayed': 54, 'eager': 0," in ended.stdout


def start(module: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module, which must succeed."""
    ended = subprocess.run(
        [sys.executable, "-m", MODULES[module], *words],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended
