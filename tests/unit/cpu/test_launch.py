"""Processes that train together, however they are started."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cg.cpu import launch
from megatron_cg.cpu.launch import run_processes

NAME = "MEGATRON_CG_OF_THIS_TEST"


def write_down(folder: Path) -> None:
    """A file for each rank, of what it was started with."""
    said = (os.environ.get(NAME), os.environ["WORLD_SIZE"], torch.get_num_threads())
    (folder / f"rank{dist.get_rank()}").write_text(repr(said))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_they_have_the_environment_of_the_moment(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "START", method)
    for value in ("one", "two", None):
        folder = tmp_path / str(value)
        folder.mkdir()
        if value is None:
            monkeypatch.delenv(NAME)
        else:
            monkeypatch.setenv(NAME, value)
        run_processes(partial(write_down, folder))
        said = {path.name: path.read_text() for path in folder.iterdir()}
        assert said == dict.fromkeys(("rank0", "rank1"), repr((value, "2", 1)))
        if method == "spawn":
            return  # Each takes seconds, and none knows of the other.
