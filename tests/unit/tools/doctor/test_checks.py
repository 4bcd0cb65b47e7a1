"""What is found on systems made for a test, and that nothing can end the doctor."""

import os
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.doctor.checks import INSTALL, Level, System, can_run, examine, run_probe
from megatron_cg.tools.doctor.probe import driver as driver_here
from megatron_cg.tools.doctor.probe import loaded, unmet
from tests.unit.tools.doctor.systems import CUDNN, LOADED, NCCL, ROOT, of_level, only, system

OTHER_CUDNN = "/opt/cudnn/lib/libcudnn.so.9.1.0"
OTHER_NCCL = "/usr/lib/libnccl.so.2.18.5"


def packages(**versions: str | None) -> dict[str, Any]:
    return {"versions": {n.replace("_", "-"): version for n, version in versions.items()}}


def driver(**changes: Any) -> dict[str, Any]:
    return {"driver": changes}


def with_te(**changes: Any) -> dict[str, Any]:
    return {"transformer-engine": changes}


@pytest.mark.parametrize("backend", [TRANSFORMER_ENGINE, NATIVE, TAPE])
def test_a_good_machine_has_facts_alone(backend: str) -> None:
    found = examine(system(backend=backend))
    assert {finding.level for finding in found} == {Level.OK} and can_run(found)
    assert ("driver" in {finding.check for finding in found}) is (backend != TAPE)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (packages(transformer_engine="2.18.0"), Level.ERROR, "transformer-engine 2.18.0"),
        (packages(megatron_core="0.18.1"), Level.WARNING, "megatron-core 0.18.1"),
        (packages(torch=None), Level.ERROR, "torch is not installed"),
        (packages(transformer_engine=None), Level.ERROR, "transformer-engine is not installed"),
        (packages(torch="2.9.1"), Level.WARNING, "torch 2.9.1 was never run"),
        (packages(torch="2.15.0"), Level.WARNING, "torch 2.15.0 was run with this package on"),
        (packages(torch="2.11.0a0+eb6.nv26.02"), Level.WARNING, "torch 2.11.0a0"),
        (packages(megatron_fsdp="99.0"), Level.WARNING, "megatron-fsdp 99.0"),
        (packages(megatron_bridge="0.7.0"), Level.WARNING, "megatron-bridge 0.7.0 was never run"),
        (packages(torchtitan="0.4.0"), Level.WARNING, "torchtitan 0.4.0 was never run"),
        ({"torch": {"cuda": None}}, Level.ERROR, "without CUDA"),
        (driver(error="no NVIDIA driver"), Level.ERROR, "no NVIDIA driver"),
        (driver(said=["sm_120 is not compatible"]), Level.WARNING, "sm_120"),
        (driver(gpus=[["T4", 7, 5]] * 2), Level.ERROR, "2 x T4 (sm_75)"),
        (driver(gpus=[["A100", 8, 0]]), Level.WARNING, "1 x A100 (sm_80)"),
        (with_te(error="ImportError: undefined symbol"), Level.ERROR, "undefined symbol"),
        (
            with_te(loaded=LOADED | {"cuDNN": [OTHER_CUDNN, CUDNN]}),
            Level.WARNING,
            f"{OTHER_CUDNN} is loaded beside torch's {CUDNN}",
        ),
        (
            with_te(loaded=LOADED | {"NCCL": [OTHER_NCCL, NCCL]}),
            Level.WARNING,
            f"{OTHER_NCCL} is loaded beside torch's {NCCL}",
        ),
    ],
)
def test_what_is_wrong_is_found_once(found: dict[str, Any], level: Level, said: str) -> None:
    here = system(found)
    assert said in only(here, level).found
    assert can_run(examine(here)) is (level is not Level.ERROR)
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
    assert said in one.found and one.level is Level.OK


def test_remedies_lead_to_what_was_measured() -> None:
    assert only(system(packages(torch=None)), Level.ERROR).remedy == INSTALL["torch"]
    first, _, second = INSTALL["transformer-engine"].partition(" && ")
    assert second.startswith("pip install --no-build-isolation")
    lines = (ROOT / "requirements" / "gpu-build.txt").read_text().splitlines()
    assert first.split()[2:] == [Requirement(line).name for line in lines]
    second_copy = system(with_te(loaded=LOADED | {"cuDNN": [OTHER_CUDNN, CUDNN]}))
    assert only(second_copy, Level.WARNING).remedy == "export CUDNN_HOME=/venv/nvidia/cudnn"
    hidden = system(driver(error="none"), variables={"CUDA_VISIBLE_DEVICES": ""})
    assert only(hidden, Level.ERROR).remedy.startswith("unset CUDA_VISIBLE_DEVICES")


def test_what_a_framework_lacks_is_said_and_installed_beside_the_same_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ``pip install --no-deps``: a folder of metadata, and nothing of what it requires."""
    needs = ("numpy>=99", "absent>1", "rich", "torch<2", "gone; extra == 'all'")
    (folder := tmp_path / "torchtitan-0.3.0.dist-info").mkdir()
    (folder / "METADATA").write_text("\n".join(f"Requires-Dist: {one}" for one in needs))
    monkeypatch.syspath_prepend(tmp_path)
    found = packages(torchtitan="0.3.0") | {"unmet": {"torchtitan": unmet("torchtitan")}}
    finding = only(system(found), Level.WARNING)
    assert finding.remedy == "pip install torch==2.11.0 'numpy>=99' 'absent>1'"


@pytest.mark.parametrize("backend", [NATIVE, TAPE])
def test_what_a_backend_does_not_need_is_not_missed(backend: str) -> None:
    gone = packages(transformer_engine=None, megatron_fsdp=None)
    assert can_run(examine(system(gone, backend=backend)))


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", Level.ERROR),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", Level.ERROR),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", Level.ERROR),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", Level.WARNING),
        ("NVTE_FUSED_ATTN", "0", Level.WARNING),
        ("CUDA_LAUNCH_BLOCKING", "1", Level.WARNING),
        ("CUDNN_HOME", "/nowhere", Level.WARNING),
        ("CUDNN_PATH", "", Level.WARNING),
    ],
)
def test_a_variable_that_is_likely_not_meant(name: str, value: str, level: Level) -> None:
    here = system(variables={name: value})
    assert f"{name}={value}" in only(here, level).found
    assert f"{name}={value}" in of_level(examine(here), Level.OK)[-1].found


def test_other_variables_that_matter_are_facts(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so.9").touch()
    matter = {"NCCL_NEW": "1", "CUDNN_HOME": str(tmp_path), "NCCL_GRAPH_REGISTER": "0"}
    matter |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = examine(system(variables=matter | {"HOME": "/root", "NCCLX": "1"}))
    assert {finding.level for finding in found} == {Level.OK}
    shown = ", ".join(f"{name}={matter[name]}" for name in sorted(matter))
    assert found[-1].found == shown


def test_a_stage_that_failed_is_an_error_and_what_depends_on_it_is_not_looked_at() -> None:
    here = system()
    answers = here.answers | {"torch": {"error": "ImportError: no libcudart"}, "driver": {}}
    found = examine(System(answers))
    (failed,) = of_level(found, Level.ERROR)
    assert failed.check == "torch" and "no libcudart" in failed.found
    assert {"driver", "libraries"}.isdisjoint({finding.check for finding in found})


PROBE = """
import json, os, signal, sys, time
out, end = sys.argv[1:]
print("last words")
sys.stdout.flush()
with open(out, "a") as file:
    file.write('{"first": {"found": 1}}\\n{"second": {}}\\n{"cut')
if end == "signal":
    os.kill(os.getpid(), signal.SIGSEGV)
if end == "wait":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "said", "seconds"),
    [
        ("signal", "died with <Signals.SIGSEGV", 60.0),
        ("wait", "timed out", 2.0),
        ("early", "ended early", 60.0),
    ],
)
def test_what_was_seen_before_the_other_process_ended_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, said: str, seconds: float
) -> None:
    folder = tmp_path / "megatron_cg" / "tools" / "doctor"
    folder.mkdir(parents=True)
    for place in (folder.parent.parent, folder.parent, folder):
        (place / "__init__.py").touch()
    (folder / "probe.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)
    communicate = subprocess.Popen.communicate

    def once_written(process: Any, *given: Any, **named: Any) -> Any:
        while end == "wait" and not Path(process.args[-2]).exists():
            time.sleep(0.01)
        return communicate(process, *given, **named)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_written)
    answers = run_probe(end, {"PYTHONPATH": str(tmp_path)}, seconds)
    assert answers["first"] == {"found": 1} and "third" not in answers
    assert said in answers["second"]["error"] and "last words" in answers["second"]["error"]


def test_what_torch_says_of_its_gpus_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import cuda

    def fails() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(cuda, "init", fails)
    assert driver_here() == {"error": "Found no NVIDIA driver"}
    made: dict[str, Any] = {
        "init": lambda: warnings.warn("sm_120 is not\n  compatible", stacklevel=1),
        "device_count": lambda: 2,
        "get_device_name": "GPU {}".format,
        "get_device_capability": lambda number: (9, number),
    }
    for name, function in made.items():
        monkeypatch.setattr(cuda, name, function)
    found = driver_here()
    assert found["gpus"] == [("GPU 0", 9, 0), ("GPU 1", 9, 1)]
    assert found["said"] == ["sm_120 is not compatible"]
    failed = system({"driver": {"error": "none"}}).answers | {"driver": {"found": {"error": "no"}}}
    assert only(System(failed), Level.ERROR).found == "torch finds no GPU: no"


def test_libraries_of_this_process_are_found() -> None:
    import torch

    found = loaded()["cuDNN"]
    assert bool(found) is torch.backends.cudnn.is_available()
    assert all(os.path.isabs(path) for path in found)
