"""The baselines that tell graphs and the fast path apart."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.tools.bench.measure import eager_fast_path
from megatron_cg.tools.bench.measure.eager_fast_path import EagerFastPath, is_given, variable
from megatron_cg.tools.bench.runs.configurations import (
    EAGER,
    EAGER_FAST_PATH,
    GRAPHS,
    PLAIN,
)
from megatron_cg.tools.cli.main import main

Make = Callable[..., dict[str, Any]]


def planned(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The words of each run's command, with its environment, by configuration."""
    command = f"bench --backend transformer_engine --dry-run {words} --out {tmp_path}"
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0].rpartition(".")[2] for line in lines if line.startswith("# llama")]
    names += [line.split(":")[0].rpartition(".")[2] for line in lines if line.startswith("# qwen")]
    commands = [shlex.split(line) for line in lines if "torch.distributed.run" in line]
    return dict(zip(names, commands, strict=True))


def test_graphs_and_the_fast_path_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ",".join((EAGER, EAGER_FAST_PATH, GRAPHS, PLAIN))
    runs = planned(f"--shapes qwen3-moe --only {only}", tmp_path, capsys)
    assert "--cg-no-fsdp-fast-path" in runs[PLAIN]
    assert "--cg-no-fsdp-fast-path" not in runs[GRAPHS]
    installs = [
        name for name, words in runs.items() if f"{eager_fast_path.VARIABLE}=" in str(words)
    ]
    assert installs == [EAGER, EAGER_FAST_PATH]
    assert f"{eager_fast_path.VARIABLE}=1" in runs[EAGER_FAST_PATH]
    assert f"{eager_fast_path.VARIABLE}=0" in runs[EAGER]


def test_an_eager_run_gets_it_after_the_warmup_steps_and_loses_it_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    path = SimpleNamespace(close=lambda: done.append("closed"))

    def installed(fsdp: str, **given: Any) -> Any:
        done.append((fsdp, given))
        return path

    monkeypatch.setattr(eager_fast_path, "install", installed)
    monkeypatch.setattr(eager_fast_path, "find_megatron_fsdp", lambda model: f"fsdp of {model}")
    model: Any = "model"
    fast_path = EagerFastPath(True, warmup_steps=2)
    for step in range(4):
        fast_path.before_step(lambda: (model, ["optimizer"]))
        assert len(done) == (step >= 2)
    assert done == [("fsdp of model", {"optimizers": ["optimizer"]})]
    fast_path.close()
    fast_path.close()
    assert done[1:] == ["closed"]


def test_it_goes_by_the_environment() -> None:
    assert is_given(variable(True))
    assert not is_given(variable(False)) and not is_given({})
