"""``megatron-cg doctor`` on the machine that the tests run on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cg.tools.cli.main import main
from megatron_cg.tools.doctor import checks
from megatron_cg.upstream.symbols import installed_version
from tests.unit.tools.doctor.systems import ROOT, system


def command(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron_cg.tools.cli.main", "doctor", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    # The variable breaks a rule, so that graphs cannot run on any machine.
    # A third of the time that Megatron's import takes is that of torch's compiler.
    quick = {"TORCHDYNAMO_DISABLE": "1"}
    # What lies in the working directory is not imported, as where a script is run.
    folder = tmp_path_factory.mktemp("working-directory")
    (folder / "numpy.py").write_text("raise ImportError('not the installed one')")
    processes = [
        command(folder, CUDA_DEVICE_MAX_CONNECTIONS="1", **quick),
        command(folder, "--backend", "tape", **quick),
    ]
    texts = [process.communicate()[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def test_what_prevents_graphs_here_is_found_and_is_the_exit_code(
    runs: list[tuple[int, str]],
) -> None:
    code, text = runs[0]
    errors = [line.split("  ", 1)[1] for line in text.splitlines() if line.startswith("error")]
    assert code == 1 and "prevent CUDA graphs here" in text.replace("prevents", "prevent")
    assert "variables: CUDA_DEVICE_MAX_CONNECTIONS=1" in errors
    missing = installed_version("transformer-engine") is None
    assert ("versions: transformer-engine is not installed" in errors) is missing
    assert not [error for error in errors if error.startswith(("symbols", "looking at"))]
    assert f"torch {installed_version('torch')}" in text


def test_the_tape_can_run_here(runs: list[tuple[int, str]]) -> None:
    code, text = runs[1]
    first, *facts = filter(None, text.splitlines())
    assert code == 0 and first == "the comparison on the CPU tape can run here"
    assert [line.split()[0] for line in facts] == ["versions", "symbols"]


def test_findings_are_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "run_probe", lambda *_: {**system().answers, "end": {"error": "x"}})
    assert main(["doctor", "--json"]) == 1
    first, *rest = json.loads(capsys.readouterr().out)
    assert first["level"] == "error" and "looking at end failed: x" in first["found"]
    assert "versions" in {finding["check"] for finding in rest}
