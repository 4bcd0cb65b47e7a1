"""The check of a wheel sees what is missing from it and what does not belong there."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tools.check_wheel import differences, expected_files

FILES = {
    "pack/__init__.py",
    "pack/py.typed",
    "pack/linked/presets/one.yaml",
}


def checkout(folder: Path) -> Path:
    """A package with a link to a folder beside it, as megatron_cg has."""
    for name in ("pack/__init__.py", "pack/py.typed", "linked/presets/one.yaml"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (folder / "pack" / "linked").symlink_to("../linked")
    (folder / "pack" / "__pycache__").mkdir()
    (folder / "pack" / "__pycache__" / "a.cpython-312.pyc").write_text("")
    return folder / "pack"


def wheel(folder: Path, names: set[str]) -> Path:
    path = folder / "pack-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted({*names, "pack-1.dist-info/METADATA"}):
            archive.writestr(name, "")
    return path


def test_files_behind_links_belong_to_the_package(tmp_path: Path) -> None:
    assert expected_files(checkout(tmp_path)) == FILES


def test_a_whole_wheel_has_no_differences(tmp_path: Path) -> None:
    assert list(differences(wheel(tmp_path, FILES), FILES)) == []


def test_what_is_missing_and_what_does_not_belong_there_is_named(tmp_path: Path) -> None:
    other = wheel(tmp_path, FILES - {"pack/linked/presets/one.yaml"} | {"tests/__init__.py"})
    assert list(differences(other, FILES)) == [
        "missing: pack/linked/presets/one.yaml",
        "not of the package: tests/__init__.py",
    ]
