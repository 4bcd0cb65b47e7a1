"""Artifacts on disk: what is checked, and what is trusted, before anything is decoded.

An artifact is one file: its manifest as a line of JSON, and then the code.

Note [What is trusted]
    The code is a pickle of torch's, so decoding it can run any code. So the folder and the file
    must belong to this user or to root, and nobody else may write them. Who can write them could as
    well change the user's scripts. Access control lists are not looked at. The checksum in the
    manifest finds damage, not an attacker, who would change both. The file is read once, so the
    bytes that are checked are the bytes that are decoded.
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from megatron_cg.errors import ArtifactRefusedError, PrecompileError
from megatron_cg.files import whole_file


@dataclass(frozen=True)
class Manifest:
    """What is known of an artifact without decoding it."""

    code_sha256: str
    fingerprint: Mapping[str, str]
    state: Mapping[str, str]
    """Plain Python values that are constants of the code; see ``plain_state.py``."""
    traced_ranks: Sequence[int]


def path_of(directory: Path, name: str) -> Path:
    """Where the artifact of that name is.

    Raises PrecompileError for a name that is not a plain file name.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise PrecompileError(f"{name!r} cannot name an artifact: use letters, digits and -")
    return directory / f"{name}.artifact"


def write(path: Path, manifest: Manifest, code: bytes) -> None:
    """Write an artifact that this user alone can read and write. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with whole_file(path, mode=0o600) as part:
        part.write_bytes(json.dumps(asdict(manifest), sort_keys=True).encode() + b"\n" + code)


def read(path: Path) -> tuple[Manifest, bytes]:
    """Read an artifact and its code. Nothing is decoded but the manifest, which is JSON.

    Raises ArtifactRefusedError if it is missing, not trusted, or damaged.
    """
    try:
        _require_own(path.parent, os.stat(path.parent))
        with path.open("rb") as file:
            _require_own(path, os.fstat(file.fileno()))
            data = file.read()
    except OSError as error:
        raise ArtifactRefusedError(
            f"{path} cannot be read ({error.strerror}): type megatron-cg precompile to make it"
        ) from error
    head, _, code = data.partition(b"\n")
    try:
        manifest = Manifest(**json.loads(head))
    except (ValueError, TypeError) as error:
        raise ArtifactRefusedError(
            f"{path} is damaged, or of another version of megatron_cg: it begins with no manifest "
            f"({error}). Copy it again, or save again"
        ) from error
    if sha256(code).hexdigest() != manifest.code_sha256:
        raise ArtifactRefusedError(
            f"{path} is damaged: its {len(code)} bytes of code have another SHA-256 than its "
            "manifest names. Copy it again, or save again"
        )
    return manifest, code


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in {os.geteuid(), 0}:
        raise ArtifactRefusedError(
            f"{path} belongs to user {status.st_uid} and not to you ({os.geteuid()}): decoding it "
            "could run that user's code. If you trust it, copy it to a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactRefusedError(
            f"other users may write {path}, and decoding it could run their code. If you trust "
            f"what it holds now, type chmod go-w {path}"
        )
