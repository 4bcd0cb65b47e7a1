"""The configuration whose layers are compiled before the run: its command, and what it reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.integrations.megatron.layer_code import LayerCall, LayerCode
from megatron_cg.tools.align.command import DETERMINISTIC_ENVIRONMENT
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench.measure.captures import CaptureMeter
from megatron_cg.tools.bench.runs import compiled_first
from megatron_cg.tools.bench.runs.commands import Settings, command
from megatron_cg.tools.bench.runs.configurations import COMPILED_GRAPHS, LOCAL_EAGER, LOCAL_GRAPHS
from megatron_cg.tools.plan.compiled import read_run

ROOT = Path(__file__).resolve().parents[4]
DATA = TokenStream(Path("data/text"), "", is_bytes=True)
SETTINGS = Settings(load_preset("llama-tiny"), nproc=2)
LOADED = {"artifact": "layer", "layers": 3, "load_seconds": 0.4, "compile_seconds": 6.0}


def words(configuration: str, artifacts: Path = Path("there")) -> list[str]:
    return command(SETTINGS, configuration, DATA.flags(Path("cache")), artifacts)


def test_its_command_compiles_from_the_flags_of_the_run() -> None:
    start, *run = words(COMPILED_GRAPHS)[2:]
    assert start == "megatron_cg.tools.bench.runs.compiled_first"
    assert [*run[:-2]] == words(LOCAL_GRAPHS) and run[-2:] == ["--cg-precompile-dir", "there"]
    compiling = compiled_first.precompile(run)
    assert compiling[compiling.index("--") + 1 :] == run
    found = read_run(None, run, None)  # Breaks no rule of this package or of Megatron.
    assert found.folder == Path("there") and found.args.world_size == 2
    assert "--cg-precompile-dir" not in words(LOCAL_EAGER)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that this process would have become."""
    found: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *words: found.append(words))
    return found


def test_the_run_starts_when_its_artifact_is_there(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the variables of an alignment, some of which turn torch's caches off."""
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = words(COMPILED_GRAPHS, tmp_path)[3:]
    compiled_first.main(run)
    assert started == [(run[0], run)]
    assert sorted(os.listdir(tmp_path)) == ["layer.artifact", "layer.json"]
    artifact = json.loads((tmp_path / "layer.json").read_text())
    assert artifact["fingerprint"]["group.tp"] == "1"


def test_a_layer_that_cannot_be_compiled_starts_no_run(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = "import os; exit(2 if os.environ['CUDA_VISIBLE_DEVICES'] == '' else 0)"
    fails = [sys.executable, "-c", seen]
    monkeypatch.setattr(compiled_first, "precompile", lambda _command: fails)
    with pytest.raises(SystemExit) as ended:
        compiled_first.main(["train"])
    assert ended.value.code == 2 and not started


def test_a_capture_says_what_was_loaded_before_it() -> None:
    noted: list[Any] = []
    meter = CaptureMeter(noted.append)
    code = LayerCode(Path("there"), LayerCall(16, 1, masked=False), "error")
    for helper in (None, SimpleNamespace(code=None), SimpleNamespace(code=code)):
        meter.helper = helper
        with meter.measuring():
            pass
    code.loaded = LOADED
    with meter.measuring():
        pass
    assert [one["loaded"] for one in noted] == [None, None, None, LOADED]
