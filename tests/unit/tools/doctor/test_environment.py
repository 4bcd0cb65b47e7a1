"""Environment variables: rules, values that are not meant, and what the others do."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cg.tools.doctor import environment
from megatron_cg.tools.doctor.finding import Finding, Level
from tests.unit.tools.doctor.systems import of_level, only, system


def look(**variables: str) -> list[Finding]:
    return list(environment.variables(system(variables=variables)))


def test_an_empty_environment_is_ok() -> None:
    assert [finding.level for finding in look()] == [Level.OK]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_a_broken_rule_of_a_run_is_an_error_and_said_once(name: str, value: str) -> None:
    found = look(**{name: value})
    assert f"{name}={value}" in only(found, Level.ERROR).found
    assert sum(name in finding.found for finding in found) == 1


def test_expandable_segments_with_registration_off_are_notes() -> None:
    found = look(PYTORCH_ALLOC_CONF="expandable_segments:True", NCCL_GRAPH_REGISTER="0")
    assert len(of_level(found, Level.NOTE)) == 2 and not of_level(found, Level.ERROR)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVTE_FUSED_ATTN", "0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("CUDNN_HOME", "/nowhere"),
    ],
)
def test_values_that_are_likely_not_meant_are_warnings(name: str, value: str) -> None:
    found = only(look(**{name: value}), Level.WARNING)
    assert f"{name}={value}" in found.found and found.remedy == f"unset {name}"


def test_a_cudnn_home_with_cudnn_in_it_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so.9").touch()
    assert "CUDNN_HOME" in only(look(CUDNN_HOME=str(tmp_path)), Level.NOTE).found


def test_all_variables_of_a_family_are_shown_and_no_others() -> None:
    found = look(NCCL_IB_HCA="mlx5", NVTE_NEW="1", TORCH_NCCL_NEW="1", HOME="/root", NCCLX="1")
    shown = {finding.found for finding in of_level(found, Level.NOTE)}
    assert shown == {"NCCL_IB_HCA=mlx5", "NVTE_NEW=1", "TORCH_NCCL_NEW=1"}
