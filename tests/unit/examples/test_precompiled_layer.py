"""The example of precompiled code: made by the command, trained with on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import precompiled_layer
from megatron_cg.tools.cpu import launch

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "precompiled_layer.py")


def train_all(bodies: dict[str, Callable[[], None]], folder: Path) -> None:
    """Run them in turn; what each prints goes to a file of this rank."""
    for name, body in bodies.items():
        with (folder / f"{name}.{dist.get_rank()}").open("w") as file, redirect_stdout(file):
            body()


def test_the_compiled_layers_train_as_the_eager_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "-m megatron_cg.tools.cli.main precompile --world-size 2 --deterministic".split()
    options = ["--out", str(tmp_path / "compiled"), "--capability", "cpu"]
    ended = subprocess.run(
        [sys.executable, *command, f"{EXAMPLE}:build", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    started: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(launch, "run_processes", started.append)
        for name in ("compiled", "nothing"):
            precompiled_layer.main(["--load", str(tmp_path / name)])
    bodies = dict(zip(("compiled", "eager"), started, strict=True))
    launch.run_processes(partial(train_all, bodies, tmp_path))
    lines = {name: (tmp_path / f"{name}.0").read_text().splitlines() for name in bodies}
    steps = []
    for name, printed in lines.items():
        assert [line.partition(", ")[0] for line in printed] == [name] * 3
        steps.append([line.partition(", ")[2] for line in printed])
    assert steps[0] == steps[1] and len(set(steps[0])) == 3
