"""Two copies of a library in one process: which is loaded, which is older, what to type."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.doctor import ask, libraries
from megatron_cg.tools.doctor.finding import Finding, Level
from tests.unit.tools.doctor.systems import ROOT, only, system, torch_answer

OWN = "/venv/nvidia/cudnn/lib/libcudnn.so.9"
PARTS: list[dict[str, Any]] = [
    {"file": OWN, "version": "9.19.0"},
    {"file": "/venv/nvidia/cudnn/lib/libcudnn_ops.so.9", "version": None},
]


def loaded(cudnn: list[dict[str, Any]], nccl: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"cudnn": cudnn, "nccl": nccl or [], "cublas": []}


def look(with_te: dict[str, Any] | None, **changes: Any) -> list[Finding]:
    answers = torch_answer(loaded=loaded(PARTS[:1]))
    if with_te is not None:
        answers[ask.TE] = {"error": None, "loaded": with_te}
    answers |= changes.pop("answers", {})
    return list(libraries.libraries(system(answers, **changes)))


def test_one_copy_of_torchs_own_is_ok() -> None:
    found = look(loaded(PARTS))
    assert [finding.level for finding in found] == [Level.OK] and "9.19.0" in found[0].found


@pytest.mark.parametrize(("version", "age"), [("9.1.0", "an older"), ("9.30.0", "a newer")])
def test_a_cudnn_of_the_system_beside_torchs_is_a_warning(version: str, age: str) -> None:
    other = {"file": "/usr/lib/libcudnn.so.9", "version": version}
    sub = {"file": "/usr/lib/libcudnn_graph.so.9", "version": None}
    found = only(look(loaded([*PARTS, sub, other])), Level.WARNING)
    assert f"{age} cuDNN {version}" in found.found and "the system's" in found.found
    assert "unfused" in found.why
    assert found.remedy == "export CUDNN_HOME=/venv/nvidia/cudnn"


@pytest.mark.parametrize("name", ["CUDNN_HOME", "LD_LIBRARY_PATH"])
def test_the_variable_that_led_to_a_second_copy_is_named(name: str) -> None:
    other = {"file": "/opt/cudnn/lib/libcudnn.so.9", "version": "9.1.0"}
    variables = {"CUDNN_HOME": "/opt/cudnn", "LD_LIBRARY_PATH": "/x:/opt/cudnn/lib"}
    found = look(loaded([*PARTS, other]), variables={name: variables[name]})
    assert f"by {name}" in only(found, Level.WARNING).found


def test_a_second_nccl_is_a_warning_too() -> None:
    own = [{"file": "/venv/nvidia/nccl/lib/libnccl.so.2", "version": "2.28.9"}]
    other = {"file": "/usr/lib/libnccl.so.2", "version": "2.18.5"}
    answers = torch_answer(loaded=loaded([], own))
    found = look(loaded([], [*own, other]), answers=answers)
    assert "an older NCCL 2.18.5" in only(found, Level.WARNING).found


def test_a_torch_that_loads_another_copy_than_its_own_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudnn.so.9").touch()
    found = look(loaded(PARTS), purelib=tmp_path, variables={"LD_PRELOAD": OWN})
    assert "by LD_PRELOAD" in only(found, Level.WARNING).found


def test_without_te_only_torchs_own_are_looked_at() -> None:
    assert [finding.level for finding in look(None)] == [Level.OK]


@pytest.mark.parametrize("whole", [True, False])
def test_a_cudnn_is_asked_for_its_version_in_a_process_that_it_may_end(
    whole: bool, tmp_path: Path
) -> None:
    """Without its parts, which are in its folder, it ends the process that asks."""
    own = Path(sysconfig.get_path("purelib")) / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    copy = tmp_path / "libcudnn.so"
    copy.write_bytes(own.read_bytes())
    code = (
        "import ctypes, json, sys\n"
        "from megatron_cg.tools.doctor.loaded import loaded\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(json.dumps(loaded()['cudnn']))"
    )
    words = [sys.executable, "-c", code, str(own if whole else copy)]
    done = subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    (found,) = json.loads(done.stdout)
    if whole:
        assert Path(found["file"]) == own.resolve() and found["version"].startswith("9.")
    else:
        assert found == {"file": str(copy), "version": None}
