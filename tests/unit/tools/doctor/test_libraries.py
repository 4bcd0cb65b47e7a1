"""Two copies of a library in one process: which is loaded, which is older, what to type."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.doctor import ask, libraries
from megatron_cg.tools.doctor.finding import Finding, Level
from megatron_cg.tools.doctor.libraries import te_cudnn_by_variables
from tests.unit.tools.doctor.systems import of_level, only, system, torch_answer

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


def test_without_te_the_loaders_choice_is_compared(tmp_path: Path) -> None:
    there = {"file": "/usr/lib/libcudnn.so.9", "version": "9.1.0"}
    found = look(None, answers={ask.LOADER: {"cudnn": there, "nccl": None, "cublas": None}})
    assert "9.1.0" in only(found, Level.WARNING).found
    nothing = look(None, answers={ask.LOADER: {"cudnn": None, "nccl": None, "cublas": None}})
    assert not of_level(nothing, Level.WARNING)


def test_without_te_its_variables_are_followed_before_the_loader(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so.9.1.0").touch()
    (tmp_path / "lib" / "libcudnn.so").symlink_to("libcudnn.so.9.1.0")
    found = look(None, variables={"CUDNN_HOME": str(tmp_path)})
    assert "an older cuDNN 9.1.0" in only(found, Level.WARNING).found


def test_te_takes_the_name_that_sorts_last_and_no_stub(tmp_path: Path) -> None:
    for name in ("libcudnn.so", "libcudnn.so.9", "stubs/libcudnn.so.99"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    chosen = te_cudnn_by_variables({"CUDNN_HOME": "/nowhere", "CUDA_HOME": str(tmp_path)})
    assert chosen == tmp_path / "libcudnn.so.9"


def test_the_real_loader_is_asked_in_another_process(tmp_path: Path) -> None:
    site = Path(sysconfig.get_path("purelib"))
    own = site / "nvidia" / "cudnn" / "lib"
    for name in ("libcudnn.so", "libcudnn_graph.so.9"):
        (tmp_path / name).symlink_to(own / name.replace("cudnn.so", "cudnn.so.9"))
    found = ask.run_probe([ask.LOADER], "tape", {"LD_LIBRARY_PATH": str(tmp_path)})
    cudnn = found[ask.LOADER]["found"]["cudnn"]
    assert Path(cudnn["file"]).resolve() == (own / "libcudnn.so.9").resolve()
    assert cudnn["version"].startswith("9.")


def test_a_cudnn_without_its_parts_ends_no_process_but_its_own(tmp_path: Path) -> None:
    own = Path(sysconfig.get_path("purelib")) / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    (tmp_path / "libcudnn.so").write_bytes(own.read_bytes())
    found = ask.run_probe([ask.LOADER], "tape", {"LD_LIBRARY_PATH": str(tmp_path)})
    cudnn = found[ask.LOADER]["found"]["cudnn"]
    assert cudnn == {"file": str(tmp_path / "libcudnn.so"), "version": None}
