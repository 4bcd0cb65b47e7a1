"""The example for loops without megatron-core, run where other packages cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
"""
"""Python runs it as it starts, in the processes that the example starts too."""


@pytest.mark.parametrize("sharding", ["megatron-fsdp", "fsdp2", "ddp"])
def test_it_trains_the_same_numbers_without_megatron_core(tmp_path: Path, sharding: str) -> None:
    if sharding == "megatron-fsdp":
        pytest.importorskip("megatron_fsdp")
    blocked = ["megatron"] if sharding == "megatron-fsdp" else ["megatron", "megatron_fsdp"]
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.replace("{blocked}", repr(blocked)))
    flags = "--compare --steps 4 --warmup 2 --layers 2 --hidden 16 --sequence 8".split()
    flags += ["--sharding", sharding]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    imported = subprocess.run(
        [sys.executable, "-c", f"import {blocked[-1]}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"blocked: {blocked[-1]}" in imported.stderr
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "standalone_transformer.py"), *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "losses of 4 steps and all parameter shards: bitwise equal" in found.stdout
    # 2 graphs; 2 layers x 2 steps x 2 microbatches.
    assert "'captured': 2, 'replayed': 8, 'eager': 0, 'mismatched': 0" in found.stdout
