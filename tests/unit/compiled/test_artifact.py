"""What is checked of an artifact before it is decoded, and a loaded graph's device and groups."""

import io
import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled import save as artifact
from megatron_cg.compiled import trace
from megatron_cg.compiled.save import read, save
from megatron_cg.compiled.trace import loading_for
from megatron_cg.errors import ArtifactRefusedError
from tests.unit.compiled.regions import Plain, of

CODE = b"any\nbytes"
MANIFEST = artifact.Manifest(
    code_sha256=sha256(CODE).hexdigest(),
    fingerprint={"version.torch": "2.11.0"},
    state={},
    traced_ranks=[0, 1],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out" / "it.artifact"
    artifact.write(path, MANIFEST, CODE)
    return path


def test_what_was_written_is_read_by_this_user_alone(path: Path) -> None:
    assert artifact.read(path) == (MANIFEST, CODE)
    assert [oct(one.stat().st_mode & 0o777) for one in (path.parent, path)] == ["0o700", "0o600"]


def changed_field(name: str, value: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        head, _, code = data.partition(b"\n")
        return json.dumps({**json.loads(head), name: value}).encode() + b"\n" + code

    return change


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data + b".", "it.artifact is damaged: its 10 bytes"),
        (lambda data: data[:-1] + b"b", "it.artifact is damaged: its 9 bytes"),
        (changed_field("code_sha256", "0" * 64), "it.artifact is damaged: its 9 bytes"),
        (lambda data: data[: len(data) // 2], "it begins with no manifest"),
        (lambda data: b"[]\n" + CODE, "it begins with no manifest"),
        (changed_field("another", 1), "of another version of megatron_cg"),
        (lambda data: b"", "it begins with no manifest"),
    ],
)
def test_damage_is_refused(damage: Callable[[bytes], bytes], text: str, path: Path) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtifactRefusedError, match=text):
        artifact.read(path)


@pytest.mark.parametrize(("of", "mode"), [("file", 0o020), ("folder", 0o002)])
def test_what_others_may_write_is_refused(of: str, mode: int, path: Path) -> None:
    theirs = path if of == "file" else path.parent
    theirs.chmod(theirs.stat().st_mode | mode)
    with pytest.raises(ArtifactRefusedError, match=rf"other users may write .*chmod go-w {theirs}"):
        artifact.read(path)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_what_belongs_to_another_user_is_refused(
    of: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(path if of == "file" else path.parent, 4711, -1)
    else:  # Who cannot give files away becomes another user.
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ArtifactRefusedError, match=r"belongs to user \d+ and not to you"):
        artifact.read(path)


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    for absent in (path.with_name("other.artifact"), path.parent / "nowhere" / "it.artifact"):
        with pytest.raises(ArtifactRefusedError, match=r"cannot be read .*save it there first"):
            artifact.read(absent)


def moves(given: torch.Tensor, module: Plain) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes tensors on the traced device and on the CPU, and reduces over a group."""
    made = given + torch.arange(4, device=given.device)
    dist.all_reduce(made, group=module.group)
    return made, torch.full((2,), 3, device="cpu")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("artifact")
    save(of(moves), folder, name="it", world_size=2, capability=None)
    return read(folder / "it.artifact")[1]


@pytest.mark.parametrize("device", ["cuda:3", "cpu"])
def test_meta_becomes_the_ranks_device_in_every_graph(
    device: str, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, so no GPU is needed to look at the graphs of one."""
    graphs: list[str] = []
    post_compile = trace._RankedOutputCode.post_compile

    def kept(self: Any, *args: Any) -> None:
        post_compile(self, *args)
        graphs.append(self._graph_module.code)

    monkeypatch.setattr(trace._RankedOutputCode, "post_compile", kept)
    with loading_for(torch.device(device), {"mcg::pair": "group 7"}):
        torch.compiler.load_compiled_function(io.BytesIO(code))
    assert len(graphs) == 2
    assert all("meta" not in text and "mcg::" not in text for text in graphs)
    assert repr(torch.device(device)) in graphs[0] and "device(type='cpu')" in graphs[0]
    assert "'group 7'" in graphs[0]
