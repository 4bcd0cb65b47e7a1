"""``megatron-cg precompile``: what it writes and prints, and which words it refuses."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.tools.conftest import Cli

BUILDER = """
import torch
from megatron_cg.compiled.region import Region

class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, given):
        return self.linear(given) * 2

def region():
    with torch.device("meta"):
        return Region(Twice(), (torch.randn(2, 4, requires_grad=True),))

def wrong():
    return 3

number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "builder_of_test", raising=False)
    path = tmp_path / "builder_of_test.py"
    path.write_text(BUILDER)
    yield str(path)
    torch.use_deterministic_algorithms(False)


def test_it_writes_an_artifact_and_says_what_it_is(file: str, tmp_path: Path, cli: Cli) -> None:
    words = f"precompile {file}:region --world-size 2 --capability cpu --deterministic --out"
    code, said, _ = cli(words, tmp_path / "out")
    assert code == 0
    manifest = json.loads((tmp_path / "out" / "region.artifact").read_bytes().partition(b"\n")[0])
    assert "region.artifact, without weights" in said
    assert "traced as ranks 0, 1 of 2" in said
    assert manifest["fingerprint"]["deterministic"] == "True"
    assert manifest["fingerprint"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("json.py", BUILDER, "has the name of another module, json,"),
        ("torch.py", BUILDER, "has the name of another module, torch,"),
        ("my.layer.py", BUILDER, "raised ModuleNotFoundError: No module named 'my'"),
        ("bad_syntax.py", "def region(:", "bad_syntax.py raised SyntaxError: "),
        ("ends.py", "import sys\nsys.exit(0)", "ends.py raised SystemExit: 0 (line 2 of "),
        ("later.py", "def region():\n    1 / 0", "ZeroDivisionError: division by zero (line 2 of"),
        ("quits.py", "def region():\n    raise SystemExit", "quits.py raised SystemExit"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_message(
    name: str, text: str, told: str, file: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / name).write_text(text)
    ended = cli(f"precompile {tmp_path}/{name}:region --world-size 2 --out {tmp_path}/o")
    (said,) = ended.err.splitlines()
    assert ended.code == 2 and told in said and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("builder.py", "builder.py names no file and function: type FILE.py:FUNCTION"),
        ("nowhere.py:build", "nowhere.py:build names no file and function"),
        ("{file}:number", "has no function number"),
        ("{file}:wrong", "wrong returned int, not a megatron_cg.compiled.region.Region"),
        ("{file}:region --capability 9.x", "invalid capability value: '9.x'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    words: str, told: str, file: str, tmp_path: Path, cli: Cli
) -> None:
    ended = cli(f"precompile --world-size 2 --out {tmp_path}/out {words.format(file=file)}")
    assert ended.code == 2 and told in ended.err.splitlines()[-1]
