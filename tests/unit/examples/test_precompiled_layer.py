"""The example of precompiled code: made by the command, trained with on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "precompiled_layer.py")


def run(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_compiled_layers_train_as_the_eager_ones_do(tmp_path: Path) -> None:
    command = "-m megatron_cg.tools.cli.main precompile --world-size 2 --deterministic".split()
    options = ["--out", str(tmp_path / "compiled"), "--capability", "cpu"]
    run(*command, f"{EXAMPLE}:build", *options)
    compiled = run(EXAMPLE, "--load", str(tmp_path / "compiled")).splitlines()
    eager = run(EXAMPLE, "--load", str(tmp_path / "nothing")).splitlines()
    assert [line.partition(", ")[0] for line in compiled] == ["compiled"] * 3
    assert [line.partition(", ")[0] for line in eager] == ["eager"] * 3
    steps = [[line.partition(", ")[2] for line in lines] for lines in (compiled, eager)]
    assert steps[0] == steps[1] and len(set(steps[0])) == 3
