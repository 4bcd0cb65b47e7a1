"""Versions that are missing, old, new, mixed, or just not the measured ones."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_cg.arguments.schema import TAPE
from megatron_cg.tools.doctor import versions
from megatron_cg.tools.doctor.finding import Finding, Level
from megatron_cg.tools.doctor.system import System, own_requirements
from tests.unit.tools.doctor.systems import ROOT, of_level, only, system, torch_answer

Check = Callable[[System], Iterator[Finding]]


def test_the_measured_versions_are_all_ok() -> None:
    for check in (versions.python, versions.packages, versions.te_parts, versions.cuda):
        assert {finding.level for finding in check(system())} == {Level.OK}


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("transformer-engine", "2.18.0", "capture_time_hooks"),
        ("megatron-core", "0.18.1", "fsdp-db-use-persist-buf-on-alloc-fail"),
        ("torch", "2.9.1", "never tested"),
    ],
)
def test_a_version_below_the_range_is_an_error(name: str, version: str, said: str) -> None:
    found = only(versions.packages(system(versions={name: version})), Level.ERROR)
    assert f"{name} {version}" in found.found and said in found.why
    assert found.remedy.startswith("pip install") and name in found.remedy and "<" in found.remedy


@pytest.mark.parametrize("name", ["torch", "megatron-core", "megatron-fsdp", "transformer-engine"])
def test_a_version_above_the_range_is_a_warning_and_no_refusal(name: str) -> None:
    found = list(versions.packages(system(versions={name: "99.0"})))
    assert "never tested" in only(found, Level.WARNING).found
    assert not of_level(found, Level.ERROR)


def test_a_version_in_the_range_that_was_not_measured_is_a_note() -> None:
    found = only(versions.packages(system(versions={"megatron-core": "0.19.3"})), Level.NOTE)
    assert "0.19.3" in found.found and "0.19.2" in found.found


@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.11.0a0+eb65b36914.nv26.02"])
def test_a_local_nightly_or_container_version_is_read(torch: str) -> None:
    there = {
        "torch": torch,
        "transformer-engine": "2.20.2+abc",
        "megatron-core": "nightly",
    }
    found = list(versions.packages(system(versions=there)))
    assert not of_level(found, Level.ERROR)


def test_a_pre_release_was_never_run() -> None:
    there = {"torch": "2.11.0a0+eb65b36914.nv26.02"}
    found = only(versions.packages(system(versions=there)), Level.NOTE)
    assert "torch 2.11.0a0+eb65b36914.nv26.02 was never run with this package" in found.found


def test_missing_packages_are_errors_but_for_the_optional_one() -> None:
    gone = dict.fromkeys(("torch", "megatron-core", "megatron-fsdp", "transformer-engine"))
    found = list(versions.packages(system(versions=gone)))
    errors = {finding.found.split()[0] for finding in of_level(found, Level.ERROR)}
    assert errors == {"torch", "megatron-core", "transformer-engine"}
    assert "megatron-fsdp" in only(found, Level.NOTE).found


@pytest.mark.parametrize(
    ("check", "gone"),
    [(versions.packages, "transformer-engine"), (versions.te_parts, "transformer-engine-torch")],
)
def test_what_compiles_te_is_installed_with_it(check: Check, gone: str) -> None:
    remedy = only(check(system(versions={gone: None})), Level.ERROR).remedy
    first, _, second = remedy.partition(" && pip install --no-build-isolation ")
    assert "transformer-engine[" in second
    lines = (ROOT / "requirements" / "gpu-build.txt").read_text().splitlines()
    assert first.split()[2:] == [Requirement(line).name for line in lines]


def test_the_tape_needs_no_transformer_engine() -> None:
    here = system(versions={"transformer-engine": None}, backend=TAPE)
    assert not of_level(versions.packages(here), Level.ERROR)


def test_a_megatron_on_the_path_counts_as_installed(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    here = system(versions={"megatron-core": None}, folders=[tmp_path])
    assert not of_level(versions.packages(here), Level.ERROR)


def test_parts_of_te_of_different_versions_are_an_error() -> None:
    mixed = system(versions={"transformer-engine-cu13": "2.19.0"})
    assert "cu13 2.19.0" in only(versions.te_parts(mixed), Level.ERROR).found
    without = system(versions={"transformer-engine-torch": None})
    assert "without" in only(versions.te_parts(without), Level.ERROR).found


@pytest.mark.parametrize(("python", "level"), [("3.11.9", Level.ERROR), ("3.13.1", Level.WARNING)])
def test_python_outside_of_the_range(python: str, level: Level) -> None:
    assert python in only(versions.python(system(python=python)), level).found


def test_a_torch_without_cuda_is_an_error() -> None:
    here = system(torch_answer(cuda=None))
    assert "without CUDA" in only(versions.cuda(here), Level.ERROR).found


def test_other_libraries_than_the_measured_ones_are_notes() -> None:
    found = list(versions.cuda(system(torch_answer(cudnn="9.1.0", nccl="2.29.1"))))
    assert len(of_level(found, Level.NOTE)) == 2 and not of_level(found, Level.ERROR)


def test_a_checkout_that_is_not_installed_has_the_ranges_of_its_pyproject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", not_installed)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = own_requirements(ROOT)
    assert set(lines) > {*project["dependencies"], f"python{project['requires-python']}"}
    assert any(line.startswith("transformer-engine") for line in lines)
    assert own_requirements(tmp_path) == ()


def test_unknown_ranges_are_said() -> None:
    found = list(versions.packages(system(requirements=())))
    assert "not known" in only(found, Level.NOTE).found
