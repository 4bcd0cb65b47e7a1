"""The example of precompiled code: made by the command, trained with on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch.distributed as dist

from examples.precompiled_layer import train
from megatron_cg.tools.cpu.launch import run_processes

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "precompiled_layer.py")
FORKED = """
import runpy, sys
import megatron.core.models.gpt, torch._inductor.compile_fx
from megatron_cg.tools.cpu import launch

launch.START = "fork"
runpy.run_path(sys.argv[1])["main"](sys.argv[2:])
"""
"""The example, whose processes need not import everything anew."""


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


def train_eagerly(folder: Path) -> None:
    """What the example does where it finds nothing compiled, in a process of this file's own."""
    with (folder / str(dist.get_rank())).open("w") as file, redirect_stdout(file):
        train(folder / "nothing", "cpu")


def test_the_compiled_layers_train_as_the_eager_ones_do(tmp_path: Path) -> None:
    command = "-m megatron_cg.tools.cli.main precompile --world-size 2 --deterministic".split()
    options = ["--out", str(tmp_path / "compiled"), "--capability", "cpu"]
    run(*command, f"{EXAMPLE}:build", *options)
    compiled = run("-c", FORKED, EXAMPLE, "--load", str(tmp_path / "compiled")).splitlines()
    run_processes(partial(train_eagerly, tmp_path))
    eager = (tmp_path / "0").read_text().splitlines()
    assert [line.partition(", ")[0] for line in compiled] == ["compiled"] * 3
    assert [line.partition(", ")[0] for line in eager] == ["eager"] * 3
    steps = [[line.partition(", ")[2] for line in lines] for lines in (compiled, eager)]
    assert steps[0] == steps[1] and len(set(steps[0])) == 3
