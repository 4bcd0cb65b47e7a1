"""``megatron-cg precompile``: what it writes and prints, and which words it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_cg.tools.cli.main import main

BUILDER = """
import torch
import torch.distributed as dist
from megatron_cg.compiled.region import Region

class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, given):
        return self.linear(given) * 2

class Ranked(Twice):
    def forward(self, given):
        return self.linear(given) * (1 + dist.get_rank())

def region(kind=Twice):
    with torch.device("meta"):
        return Region(kind(), (torch.randn(2, 4, requires_grad=True),))

def ranked():
    return region(Ranked)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "builder_of_test", raising=False)
    path = tmp_path / "builder_of_test.py"
    path.write_text(BUILDER)
    return str(path)


def test_it_writes_an_artifact_and_says_what_it_is(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"precompile {file}:region --world-size 2 --capability cpu --deterministic --out"
    assert main([*words.split(), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "region.artifact").read_bytes().partition(b"\n")[0])
    assert f"region.artifact: {manifest['code_bytes']} bytes" in said
    assert "traced as ranks 0, 1 of 2" in said and "groups: none" in said
    assert manifest["fingerprint"]["deterministic"] == "True"
    assert manifest["fingerprint"]["device"] == "cpu"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_region_that_differs_between_ranks_is_an_error_that_names_it(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"precompile {file}:ranked --world-size 2 --name other --out {tmp_path}/out".split()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "on rank 0 and " in said and "on rank 1" in said and "Ranked" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("build", "text"),
    [
        ("builder.py", "builder.py names no function: type FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("no_such_module_here:build", "there is no module no_such_module_here"),
        ("json:build", "json has no function build"),
        ("json:__name__", "json has no function __name__"),
    ],
)
def test_a_builder_that_is_not_there_is_an_error(
    build: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["precompile", build, "--world-size", "2", "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("capability", ["9", "9.x", "hopper"])
def test_a_capability_that_is_none_is_refused(
    capability: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"precompile json:dumps --world-size 2 --out x --capability {capability}".split()
    with pytest.raises(SystemExit):
        main(words)
    assert "neither a compute capability, such as 9.0, nor cpu" in capsys.readouterr().err


def test_words_after_a_bare_dash_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("precompile json:dumps --world-size 2 --out x -- --bf16".split()) == 2
    assert "leave out --bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def build(): raise ValueError('mine')", "build raised ValueError: mine"),
        ("def build(): return 3", "build returned int, not a megatron_cg.compiled.region.Region"),
        ("def build(", "cannot be imported: SyntaxError"),
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_an_error_of_the_function_is_not_called_a_defect_of_ours(
    code: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "wrong_of_test", raising=False)
    path = tmp_path / "wrong_of_test.py"
    path.write_text(code)
    words = ["precompile", f"{path}:build", "--world-size", "2", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert reason in told.splitlines()[-1] and "defect" not in told
