"""Driver, GPUs, memory, with a driver and an nvidia-smi made for the test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.doctor import ask
from megatron_cg.tools.doctor import gpu_checks as machine
from megatron_cg.tools.doctor.finding import Finding, Level
from megatron_cg.tools.doctor.probe import nvidia_smi
from tests.unit.tools.doctor.systems import ANSWERS, H200, of_level, only, system, torch_answer

UUID = "GPU-abababab-abab-abab-abab-abababababab"


def with_driver(**changes: Any) -> dict[str, Any]:
    return {ask.DRIVER: ANSWERS[ask.DRIVER] | changes}


def memory(**changes: Any) -> list[Finding]:
    return list(machine.memory(system(with_driver(**changes))))


def row(free: int, uuid: str = UUID) -> dict[str, Any]:
    return {"uuid": uuid, "driver": "580.1", "total": 140000, "free": free}


@pytest.mark.parametrize(
    ("supported", "level"),
    [("13.0", Level.OK), ("13.2", Level.OK), ("12.8", Level.ERROR)],
)
def test_the_driver_must_know_torchs_cuda(supported: str, level: Level) -> None:
    found = only(machine.driver(system(with_driver(cuda=supported))), level)
    assert supported in found.found


def test_a_driver_of_an_older_minor_version_is_a_warning() -> None:
    answers = with_driver(cuda="13.0") | torch_answer(cuda="13.1")
    assert "13.1" in only(machine.driver(system(answers)), Level.WARNING).found


@pytest.mark.parametrize(
    ("cuda", "variables", "said"),
    [
        (None, {}, "no NVIDIA driver"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES="),
        ("13.0", {}, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_driver_that_cannot_be_used_is_an_error(
    cuda: str | None, variables: dict[str, str], said: str
) -> None:
    failed = "cuInit gives CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"
    answers = with_driver(cuda=cuda, error=failed, gpus=[])
    assert said in only(machine.driver(system(answers, variables=variables)), Level.ERROR).found


@pytest.mark.parametrize(
    ("capability", "level"),
    [([9, 0], Level.OK), ([8, 0], Level.NOTE), ([8, 9], Level.NOTE), ([7, 5], Level.ERROR)],
)
def test_gpus_by_their_capability(capability: list[int], level: Level) -> None:
    gpus = [H200 | {"capability": capability}] * 2
    found = only(machine.gpus(system(with_driver(gpus=gpus))), level)
    assert found.found.startswith("2 x NVIDIA H200")


def test_gpus_that_access_each_other_are_said_to() -> None:
    assert list(machine.peers(system(with_driver(gpus=[H200])))) == []
    found = only(machine.peers(system(with_driver(gpus=[H200] * 2))), Level.OK)
    assert "each GPU can access" in found.found


def test_gpus_that_are_apart_are_named() -> None:
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    answers = with_driver(gpus=[H200] * 3, apart=pairs[:2])
    found = only(machine.peers(system(answers)), Level.NOTE)
    assert found.found.endswith("0 to 1, 1 to 0") and "--cg-moe-exchange nccl" in found.remedy
    answers = with_driver(gpus=[H200] * 3, apart=pairs)
    found = only(machine.peers(system(answers)), Level.NOTE)
    assert found.found.endswith("0 to 1, 1 to 0, 0 to 2, 2 to 0, and 2 more pairs")


def test_a_gpu_that_torch_has_no_kernels_for_is_an_error() -> None:
    answers = with_driver(gpus=[H200 | {"capability": [10, 0]}])
    answers |= torch_answer(architectures=["sm_80", "sm_90", "sm_90a"])
    assert "sm_90a" in only(machine.gpus(system(answers)), Level.ERROR).found
    answers |= torch_answer(architectures=["compute_90"])
    assert not of_level(machine.gpus(system(answers)), Level.ERROR)


def test_the_driver_is_named_where_nvidia_smi_names_it() -> None:
    (found,) = machine.driver(system(with_driver(rows=[row(1)])))
    assert found.found.startswith("driver 580.1 runs CUDA up to 13.0")


def test_memory_that_others_have_taken_is_a_warning() -> None:
    found = only(memory(rows=[row(100000)]), Level.WARNING)
    assert "40,000 of 140,000 MiB" in found.found
    free = only(memory(rows=[row(139000)]), Level.OK)
    assert "139,000 of 140,000" in free.found


def test_memory_that_cannot_be_known_is_a_note() -> None:
    assert "lists other GPUs" in only(memory(rows=[row(1, "x")], no_rows=""), Level.NOTE).found
    assert "there is no nvidia-smi" in only(memory(), Level.NOTE).found


@pytest.mark.parametrize(
    ("script", "rows", "why"),
    [
        (None, [], "there is no nvidia-smi"),
        ("exit 9", [], "exit status 9"),
        ("echo NVIDIA-SMI has failed", [], "lists no memory"),
        ("", [], "lists no memory"),
        (f"echo {UUID}, 580.1, 140000, 100000", [row(100000)], ""),
    ],
)
def test_nvidia_smi_is_read_or_says_why_not(
    script: str | None,
    rows: list[dict[str, Any]],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, said = nvidia_smi()
    assert found == rows and why in said and bool(said) is not bool(rows)


def test_little_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(mib: int) -> list[Finding]:
        blocks = mib * 2**20 // 4096
        fields = (4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255)
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
        return list(machine.shared_memory(system(shared_memory=tmp_path)))

    found = only(sized(64), Level.WARNING)
    assert "64 MiB" in found.found and "--shm-size" in found.remedy
    assert only(sized(2048), Level.OK)


def test_a_torch_without_gloo_cannot_run_the_tape() -> None:
    assert only(machine.gloo(system(torch_answer(gloo=False))), Level.ERROR)
    assert only(machine.gloo(system()), Level.OK)
