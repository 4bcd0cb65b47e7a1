"""What is checked of the files before anything in them is decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from megatron_cg.compiled import store
from megatron_cg.errors import ArtifactRefusedError, PrecompileError

DATA = b"any bytes"


def manifest(data: bytes = DATA) -> store.Manifest:
    return store.Manifest(
        name="it",
        artifact_sha256=sha256(data).hexdigest(),
        artifact_bytes=len(data),
        fingerprint={"version.torch": "2.11.0"},
        roles=("tp",),
        traced_ranks=(0, 1),
        world_size=2,
        code_sha256="0" * 64,
        sources=(("os", 1, 2, "0" * 64),),
        seconds=1.5,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = tmp_path / "torch's"
    file.write_bytes(DATA)
    store.write(tmp_path / "out", manifest(), file)
    return tmp_path / "out"


def test_what_was_written_is_read(folder: Path) -> None:
    found = store.read(folder, "it")
    assert found.manifest == manifest() and found.data == DATA
    assert found.manifest_sha256 == sha256((folder / "it.json").read_bytes()).hexdigest()
    assert store.read(folder, "it", found.manifest_sha256) == found


def test_only_this_user_can_read_or_write_it(folder: Path) -> None:
    modes = [oct(path.stat().st_mode & 0o777) for path in (folder, *sorted(folder.iterdir()))]
    assert modes == ["0o700", "0o600", "0o600"]


def longer(folder: Path) -> None:
    (folder / "it.artifact").write_bytes(DATA + b".")


def flipped(folder: Path) -> None:
    (folder / "it.artifact").write_bytes(b"b" + DATA[1:])


def half_a_manifest(folder: Path) -> None:
    text = (folder / "it.json").read_text()
    (folder / "it.json").write_text(text[: len(text) // 2])


def changed_field(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "it.json").read_text())
        (folder / "it.json").write_text(json.dumps({**fields, name: value}))

    return change


def a_list(folder: Path) -> None:
    (folder / "it.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (longer, "it.artifact is damaged"),
        (flipped, "it.artifact is damaged"),
        (changed_field("artifact_sha256", "0" * 64), "it.artifact is damaged"),
        (half_a_manifest, "it.json is damaged"),
        (a_list, "it.json is damaged"),
        (changed_field("sources", [1]), "it.json is damaged"),
        (changed_field("another", 1), "it.json is damaged"),
        (changed_field("format", 1), "has format 1"),
        (lambda folder: (folder / "it.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "it.artifact").unlink(), "cannot be read"),
    ],
)
def test_damage_is_refused(damage: Callable[[Path], None], text: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ArtifactRefusedError, match=text):
        store.read(folder, "it")


@pytest.mark.parametrize("name", [".", "it.json", "it.artifact"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_refused(name: str, mode: int, folder: Path) -> None:
    digest = store.read(folder, "it").manifest_sha256
    path = folder / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(ArtifactRefusedError, match=r"other users may write .*chmod go-w"):
        store.read(folder, "it")
    assert store.read(folder, "it", digest).data == DATA


@pytest.mark.parametrize("name", ["folder", "it.json", "it.artifact"])
def test_what_belongs_to_another_user_is_refused(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, seen from here: what differs is the owner that the system reports."""
    path = folder if name == "folder" else folder / name
    theirs = path.stat().st_ino
    fields = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size")

    def reported(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def call(*args: object, **kwargs: object) -> os.stat_result:
            found = real(*args, **kwargs)
            if found.st_ino != theirs:
                return found
            values = {field: getattr(found, field) for field in fields} | {"st_uid": 4711}
            return os.stat_result((*values.values(), 0, 0, 0))

        return call

    digest = store.read(folder, "it").manifest_sha256
    monkeypatch.setattr(os, "stat", reported(os.stat))
    monkeypatch.setattr(os, "fstat", reported(os.fstat))
    with pytest.raises(ArtifactRefusedError, match="belongs to user 4711 and not to you"):
        store.read(folder, "it")
    assert store.read(folder, "it", digest).data == DATA


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactRefusedError, match="there is no folder"):
        store.read(tmp_path / "nowhere", "it")


def test_a_save_that_is_cut_off_leaves_no_manifest_of_another_artifact(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="nothing"):
        store.write(folder, manifest(), tmp_path / "nothing")
    assert [path.name for path in folder.iterdir()] == ["it.artifact"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "../it", "/it", ".it"])
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PrecompileError, match="cannot name an artifact"):
        store.read(tmp_path, name)
