"""Copies of Megatron, files that stand before a module, and what compiles dataset helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.doctor import module_places as modules
from megatron_cg.tools.doctor.finding import Level
from tests.unit.tools.doctor.systems import of_level, only, system


def megatron(folder: Path, patch: int = 2, parts: tuple[str, ...] = ("core", "training")) -> Path:
    for part in parts:
        (folder / "megatron" / part / "datasets").mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    text = f'MAJOR = 0\nMINOR = 19\nPATCH = {patch}\nPRE_RELEASE = ""\n'
    (folder / "megatron" / parts[0] / "package_info.py").write_text(text)
    return folder


def test_one_megatron_is_ok(tmp_path: Path) -> None:
    here = system(folders=[tmp_path / "empty", megatron(tmp_path / "site")])
    (found,) = modules.megatron_copies(here)
    assert found.level is Level.OK and "0.19.2" in found.found


def test_a_clone_before_the_installed_one_is_two_copies(tmp_path: Path) -> None:
    clone, site = megatron(tmp_path / "clone", patch=1), megatron(tmp_path / "site")
    (found,) = of_level(modules.megatron_copies(system(folders=[clone, site])), Level.WARNING)
    assert "second megatron.core, 0.19.2" in found.found and str(site) in found.found
    assert "the first one is imported (0.19.1)" in found.why


def test_core_and_training_of_two_copies_are_a_warning(tmp_path: Path) -> None:
    core = megatron(tmp_path / "core", parts=("core",))
    whole = megatron(tmp_path / "site")
    found = of_level(modules.megatron_copies(system(folders=[core, whole])), Level.WARNING)
    assert "mixed" in found[-1].why


@pytest.mark.parametrize("parts", [(), ("core",)])
def test_a_missing_part_of_megatron_is_an_error(tmp_path: Path, parts: tuple[str, ...]) -> None:
    if parts:
        megatron(tmp_path, parts=parts)
    assert only(modules.megatron_copies(system(folders=[tmp_path])), Level.ERROR)


def helpers(tmp_path: Path, *files: str, **changes: Any) -> Any:
    megatron(tmp_path)
    for name in files:
        (tmp_path / "megatron" / "core" / "datasets" / name).touch()
    return modules.dataset_helpers(system(folders=[tmp_path], **changes))


def test_compiled_helpers_without_a_makefile_are_a_note(tmp_path: Path) -> None:
    found = only(helpers(tmp_path, "helpers_cpp.cpython-312-x86_64-linux-gnu.so"), Level.NOTE)
    assert "no Makefile" in found.found and "-m megatron_cg" in found.remedy


def test_neither_makefile_nor_helpers_is_an_error(tmp_path: Path) -> None:
    assert "neither" in only(helpers(tmp_path), Level.ERROR).found


def test_a_makefile_needs_make_and_a_compiler(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "make").touch(mode=0o755)
    found = helpers(tmp_path, "Makefile", variables={"PATH": str(tools)})
    assert "there is no g++" in only(found, Level.ERROR).found
    (tools / "g++").touch(mode=0o755)
    again = modules.dataset_helpers(system(folders=[tmp_path], variables={"PATH": str(tools)}))
    assert [finding.level for finding in again] == [Level.OK]


@pytest.mark.parametrize("name", ["torch.py", "megatron.py", "yaml/__init__.py"])
def test_a_users_file_of_a_modules_name_is_a_warning(tmp_path: Path, name: str) -> None:
    mine, site = tmp_path / "mine", tmp_path / "site"
    module = name.split("/", maxsplit=1)[0].removesuffix(".py")
    for file in (mine / name, megatron(site) / module / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (site / "megatron" / "__init__.py").unlink(missing_ok=True)
    here = system(folders=[mine, site], given=[mine])
    found = only(modules.shadowing(here), Level.WARNING)
    assert f"is imported as {module}" in found.found and str(mine) in found.found


def test_what_is_only_installed_twice_is_not_the_users(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "yaml").mkdir(parents=True)
        (tmp_path / place / "yaml" / "__init__.py").touch()
    here = system(folders=[tmp_path / "one", tmp_path / "two"])
    assert [finding.level for finding in modules.shadowing(here)] == [Level.OK]


def test_another_copy_of_this_package_is_said(tmp_path: Path) -> None:
    (tmp_path / "megatron_cg").mkdir()
    (tmp_path / "megatron_cg" / "__init__.py").touch()
    found = only(modules.shadowing(system(folders=[tmp_path], given=[tmp_path])), Level.WARNING)
    assert str(tmp_path / "megatron_cg") in found.found
