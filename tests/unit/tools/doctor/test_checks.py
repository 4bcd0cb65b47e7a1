"""What is found on systems made for a test, and that nothing can end the doctor."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor import checks
from megatron_cg.tools.doctor.checks import (
    ERROR,
    INSTALL,
    OK,
    WARNING,
    Finding,
    System,
    can_run,
    examine,
    loaded,
    look,
    look_at_driver,
    look_up,
)
from megatron_cg.upstream.symbols import installed_version
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT
from tests.unit.tools.conftest import Cli

ROOT = Path(__file__).resolve().parents[4]
CUDNN = "/venv/nvidia/cudnn/lib/libcudnn.so.9"
NCCL = "/venv/nvidia/nccl/lib/libnccl.so.2"
LOADED = {"cuDNN": [CUDNN], "NCCL": [NCCL], "cuBLAS": []}
FOUND: dict[str, Any] = {
    "machine": "Linux",
    "versions": GOOD_ENVIRONMENT.versions,
    "torch": {
        "folder": "/venv/torch",
        "cuda": "13.0",
        "cuDNN": "9.19.0",
        "NCCL": "2.28.9",
        "loaded": LOADED,
    },
    "driver": {"error": None, "gpus": [["NVIDIA H200", 9, 0]]},
    "transformer-engine": {"error": None, "loaded": LOADED, "experts_lack": ""},
    "symbols": [],
}
OTHER_CUDNN = "/opt/cudnn/lib/libcudnn.so.9.1.0"
OTHER_NCCL = "/usr/lib/libnccl.so.2.18.5"


def system(found: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> System:
    """A good system, but for what is ``found`` by stage and for the ``changes``."""
    stages = FOUND | {
        stage: FOUND[stage] | dict(differs) for stage, differs in (found or {}).items()
    }
    return System(stages, **changes)


def of_level(findings: Iterable[Finding], level: str) -> list[Finding]:
    """Those of one level; all but facts must say why they matter and what to type."""
    found = [finding for finding in findings if finding.level is level]
    assert level is OK or all(finding.why and finding.remedy for finding in found)
    return found


def only(here: System, level: str) -> Finding:
    (found,) = of_level(examine(here), level)
    return found


def packages(**versions: str | None) -> dict[str, Any]:
    return {"versions": {n.replace("_", "-"): version for n, version in versions.items()}}


def driver(**changes: Any) -> dict[str, Any]:
    return {"driver": changes}


def with_te(**changes: Any) -> dict[str, Any]:
    return {"transformer-engine": changes}


@pytest.mark.parametrize("backend", [TRANSFORMER_ENGINE, NATIVE, TAPE])
def test_a_good_machine_has_facts_alone(backend: str) -> None:
    found = examine(system(backend=backend))
    assert {finding.level for finding in found} == {OK} and can_run(found)
    assert ("driver" in {finding.check for finding in found}) is (backend != TAPE)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (packages(transformer_engine="2.18.0"), ERROR, "transformer-engine 2.18.0"),
        (packages(megatron_core="0.18.1"), WARNING, "megatron-core 0.18.1"),
        (packages(torch=None), ERROR, "torch is not installed"),
        (packages(megatron_bridge="0.7.0"), WARNING, "megatron-bridge 0.7.0"),
        (packages(torch="2.15.0"), WARNING, "torch 2.15.0 was not measured with"),
        ({"torch": {"cuda": None}}, ERROR, "without CUDA"),
        (driver(error="no NVIDIA driver"), ERROR, "no NVIDIA driver"),
        (driver(gpus=[["T4", 7, 5]] * 2), ERROR, "2 x T4 (sm_75)"),
        (driver(gpus=[["A100", 8, 0]]), WARNING, "1 x A100 (sm_80)"),
        (with_te(error="ImportError: undefined symbol"), ERROR, "undefined symbol"),
        (
            with_te(loaded=LOADED | {"cuDNN": [OTHER_CUDNN, CUDNN]}),
            WARNING,
            f"{OTHER_CUDNN} is loaded beside torch's {CUDNN}",
        ),
        (
            with_te(loaded=LOADED | {"NCCL": [OTHER_NCCL, NCCL]}),
            WARNING,
            f"{OTHER_NCCL} is loaded beside torch's {NCCL}",
        ),
    ],
)
def test_what_is_wrong_is_found_once(found: dict[str, Any], level: str, said: str) -> None:
    here = system(found)
    assert said in only(here, level).found
    assert can_run(examine(here)) is (level is not ERROR)
    assert examine(here)[0].level is level  # The worst is first.


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("", "cublas (BF16, FP8) or torch"),
        ("cuBLASLt is 13.1", "torch (BF16); for cublas (BF16, FP8) pip install"),
        ("no GPU is visible", "none: no GPU is visible"),
    ],
)
def test_what_can_compute_experts_in_graphs_is_said(lacks: str, said: str) -> None:
    found = examine(system(with_te(experts_lack=lacks)))
    (one,) = (finding for finding in found if "experts" in finding.found)
    assert said in one.found and one.level is OK


def test_remedies_lead_to_what_was_measured() -> None:
    assert only(system(packages(torch=None)), ERROR).remedy == INSTALL["torch"]
    first, _, second = INSTALL["transformer-engine"].partition(" && ")
    assert second.startswith("pip install --no-build-isolation")
    lines = (ROOT / "requirements" / "gpu-build.txt").read_text().splitlines()
    assert first.split()[2:] == [Requirement(line).name for line in lines]
    second_copy = system(with_te(loaded=LOADED | {"cuDNN": [OTHER_CUDNN, CUDNN]}))
    assert only(second_copy, WARNING).remedy == "export CUDNN_HOME=/venv/nvidia/cudnn"
    hidden = system(driver(error="none"), variables={"CUDA_VISIBLE_DEVICES": ""})
    assert only(hidden, ERROR).remedy.startswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("backend", [NATIVE, TAPE])
def test_what_a_backend_does_not_need_is_not_missed(backend: str) -> None:
    gone = packages(transformer_engine=None, megatron_fsdp=None)
    assert can_run(examine(system(gone, backend=backend)))


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", ERROR),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", ERROR),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", WARNING),
    ],
)
def test_a_variable_that_is_likely_not_meant(name: str, value: str, level: str) -> None:
    here = system(variables={name: value})
    assert f"{name}={value}" in only(here, level).found
    assert f"{name}={value}" in of_level(examine(here), OK)[-1].found


def test_other_variables_that_matter_are_facts(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so.9").touch()
    matter = {"NCCL_NEW": "1", "CUDNN_HOME": str(tmp_path), "NCCL_GRAPH_REGISTER": "0"}
    matter |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = examine(system(variables=matter | {"HOME": "/root", "NCCLX": "1"}))
    assert {finding.level for finding in found} == {OK}
    shown = ", ".join(f"{name}={matter[name]}" for name in sorted(matter))
    assert found[-1].found == shown


def test_a_stage_that_failed_is_an_error_and_what_depends_on_it_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise ImportError("no libcudart")

    made = ("machine", lambda: "Linux"), ("torch", fails)
    monkeypatch.setattr(checks, "stages", lambda _: made)
    found, (failed,) = look(TAPE)
    assert found == {"machine": "Linux"} and (failed.check, failed.level) == ("torch", ERROR)
    assert failed.found == "looking at torch failed: ImportError: no libcudart"
    rest = {name: one for name, one in FOUND.items() if name != "torch"}
    assert "libraries" not in {finding.check for finding in examine(System(rest))}


def test_what_torch_says_of_its_gpus_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import cuda

    def fails() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(cuda, "init", fails)
    assert look_at_driver() == {"error": "Found no NVIDIA driver"}
    made: dict[str, Any] = {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_name": "GPU {}".format,
        "get_device_capability": lambda number: (9, number),
    }
    for name, function in made.items():
        monkeypatch.setattr(cuda, name, function)
    found = look_at_driver()
    assert found["gpus"] == [("GPU 0", 9, 0), ("GPU 1", 9, 1)]
    failed = FOUND | {"driver": {"error": "no"}}
    assert only(System(failed), ERROR).found == "torch finds no GPU: no"


def test_libraries_of_this_process_are_found() -> None:
    import torch

    found = loaded()["cuDNN"]
    assert bool(found) is torch.backends.cudnn.is_available()
    assert all(os.path.isabs(path) for path in found)


def test_a_missing_symbol_and_a_broken_module_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "relying"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text(
        "from megatron_cg.upstream.symbols import Symbol\n"
        "RELIES_ON = (Symbol('torch:gone', 'a thing'), Symbol('torch', 'it'),\n"
        "             Symbol('not_there', 'another'))\n"
    )
    (package / "two.py").write_text("import gone\nRELIES_ON = ()\n")
    (package / "three.py").write_text("RELIED = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = look_up("transformer_engine", package)
    assert [(row["symbol"], "error" in row, "skipped" in row) for row in rows] == [
        ("torch:gone", True, False),
        ("torch", False, False),
        ("not_there", False, True),
        ("relying.two", True, False),
    ]
    here = System(FOUND | {"symbols": rows})
    found = of_level(examine(here), ERROR)
    assert [one.found for one in found] == [
        "symbols of megatron-cg are missing or changed: relying.two",
        "symbols of torch are missing or changed: torch:gone",
    ]
    assert "not-there: not installed" in [one.found for one in examine(here)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the working directory is not imported, as where a script is run."""
    (tmp_path / "numpy.py").write_text("raise ImportError('not the installed one')")
    monkeypatch.chdir(tmp_path)
    # A third of the time that Megatron's import takes is that of torch's compiler.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def test_what_prevents_graphs_here_is_found_and_is_the_exit_code(
    elsewhere: None, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It breaks a rule, so that graphs cannot run on any machine.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    code, text, _ = cli("doctor")
    errors = [line.split("  ", 1)[1] for line in text.splitlines() if line.startswith("error")]
    assert code == 1 and f"CUDA graphs cannot run here, errors: {len(errors)}" in text
    assert "variables: CUDA_DEVICE_MAX_CONNECTIONS=1" in errors
    missing = installed_version("transformer-engine") is None
    assert ("versions: transformer-engine is not installed" in errors) is missing
    assert not [error for error in errors if error.startswith(("symbols", "looking at"))]
    assert f"torch {installed_version('torch')}" in text


def test_the_tape_can_run_here(elsewhere: None, cli: Cli) -> None:
    ended = cli("doctor --backend tape")
    first, *facts = filter(None, ended.out.splitlines())
    assert ended.code == 0 and first == "the comparison on the CPU tape can run here"
    assert [line.split()[0] for line in facts] == ["versions", "symbols"]


def test_findings_are_one_line_of_json(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(checks, "look", lambda _: (FOUND, [Finding(ERROR, "it failed")]))
    ended = cli("doctor --json")
    first, *rest = json.loads(ended.out)
    assert ended.code == 1 and (first["level"], first["found"]) == ("error", "it failed")
    assert "versions" in {finding["check"] for finding in rest}
